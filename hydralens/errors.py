"""The one exception for wrong input: a line that says what is wrong and how to mend it."""


class InputError(ValueError):
    """The user's input is wrong. The message is one line; the command line prints it and exits with 2."""


class UnsupportedModelError(InputError):
    """The model breaks an assumption of the patching engine; the message names the family and the assumption."""


class ProbeNotSolvedError(InputError):
    """Too few pairs of a probe are answered by the model for its scores to mean anything."""


def check_word(name: str, value: str, words: tuple[str, ...]) -> None:
    """Refuse an argument that is not one of ``words``.

    Raises:
        InputError: names the argument, its value and the words.
    """
    if value not in words:
        raise InputError(f"{name} {value!r} is not one of {', '.join(words)}")
