"""From an untrained hybrid to one that speaks: alignment, distillation, fine-tuning (HydraHead)."""
