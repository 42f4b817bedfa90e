"""A device whose memory holds so many tokens a pass."""

import torch

from adpo.trainers import group_step


class Small:
    """Backward group_step of more tokens fail half-way."""

    def __init__(self, monkeypatch, tokens):
        self.tokens, self.failures = tokens, 0
        plain = group_step.Passes.back_propagate

        def back_propagate(of, share):
            inner = plain(of, share)

            def failing(loss):
                if of.scorer.budget.running > self.tokens:
                    self.failures += 1
                    first = next(of.model.parameters())  # some gradients are there already, others not yet
                    first.grad = torch.ones_like(first)
                    raise torch.OutOfMemoryError("no more")
                inner(loss)

            return failing

        monkeypatch.setattr(group_step.Passes, "back_propagate", back_propagate)
