"""How well a model does, base or hybrid alike: retrieval by length and depth, reasoning in context, perplexity by position, speed and cache."""

from hydralens.evaluation.answers import answered
from hydralens.evaluation.asking import ask_reasoning, ask_retrieval, retrieval_prompts
from hydralens.evaluation.harness import harness
from hydralens.evaluation.perplexity import made_documents, perplexity
from hydralens.evaluation.speed import speed

__all__ = ["answered", "ask_reasoning", "ask_retrieval", "harness", "made_documents", "perplexity", "retrieval_prompts", "speed"]
