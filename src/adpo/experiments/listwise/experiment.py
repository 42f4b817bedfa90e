"""What the cells of the job compute: the reference, and one training run with its exam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adpo.experiments.listwise import corpus, data, models
from adpo.experiments.listwise.measure import measured
from adpo.experiments.listwise.methods import METHODS
from adpo.experiments.listwise.protocol import SWEEP_SEED, Protocol
from adpo.experiments.listwise.scoring import seq_logp
from adpo.experiments.listwise.train import Setting, train


class Experiment:
    """Model and lists in memory; every run begins with the model as it was loaded."""

    def __init__(self, listings: list[data.Listing], model: Path | None, protocol: Protocol) -> None:
        self.protocol = protocol
        self.split = data.split(listings, protocol.validation, protocol.test)
        self.model, tokenizer = models.load(model)
        if next(self.model.parameters()).is_cuda:
            torch.set_float32_matmul_precision("high")  # the output layer; the rest is bfloat16 there anyway
        self.corpus = corpus.encode(listings, tokenizer, protocol.response_tokens)
        self.start = {name: weight.clone() for name, weight in self.model.state_dict().items()}

    def reference(self) -> dict[str, Any]:
        """Log-probabilities of all responses before training, and what two scores without training are worth.

        ``reference`` ranks by the mean log-probability per token, ``length`` by the number of tokens.
        """
        self.model.load_state_dict(self.start)
        everything = torch.arange(len(self.corpus.sequences))
        logp = self._scored(everything).cpu()
        lengths = self.corpus.response_lengths()
        return {
            "seq_logp": logp.tolist(),
            "split": {name: len(prompts) for name, prompts in self.split._asdict().items()},
            "tokens": {
                name: int(self.corpus.lengths()[_sequences(self.corpus, prompts)].sum())
                for name, prompts in self.split._asdict().items()
            },
            "cut": round(float((lengths == self.protocol.response_tokens).double().mean()), 4),
            "test": {
                "reference": measured(self.corpus, self.split.test, logp / lengths),
                "length": measured(self.corpus, self.split.test, lengths),
            },
        }

    def sweep(self, ref_logp: list[float], method: str, setting: Setting) -> dict[str, Any]:
        """A shorter run, judged on the validation prompts."""
        tokens = round(self.protocol.sweep_share * self.protocol.tokens)
        return self._run(ref_logp, method, setting, SWEEP_SEED, tokens, self.split.validation)

    def run(self, ref_logp: list[float], method: str, setting: Setting, seed: int) -> dict[str, Any]:
        """A reported run, judged on the test prompts."""
        return self._run(ref_logp, method, setting, seed, self.protocol.tokens, self.split.test)

    def _run(
        self,
        ref_logp: list[float],
        method: str,
        setting: Setting,
        seed: int,
        tokens: int,
        judged: Sequence[int],
    ) -> dict[str, Any]:
        self.model.load_state_dict(self.start)
        reference = torch.tensor(ref_logp)
        trained = train(
            self.model,
            self.corpus,
            self.split.train,
            reference,
            METHODS[method],
            setting,
            self.protocol,
            tokens,
            seed,
        )
        return {
            "method": method,
            "seed": seed,
            "setting": asdict(setting),
            "trained": trained._asdict(),
            **self._exam(reference, judged),
        }

    def _exam(self, reference: Tensor, judged: Sequence[int]) -> dict[str, Any]:
        chosen = _sequences(self.corpus, judged)
        logp = reference.clone()
        logp[chosen] = self._scored(chosen).cpu()
        log_ratio, mean_logp = logp - reference, logp / self.corpus.response_lengths()
        best = torch.cat([self._best(prompt) for prompt in judged])
        return {
            "measures": {
                "log_ratio": measured(self.corpus, judged, log_ratio),
                "mean_logp": measured(self.corpus, judged, mean_logp),
            },
            "drift": {
                "best": round(float(log_ratio[best].mean()), 4),
                "all": round(float(log_ratio[chosen].mean()), 4),
            },
        }

    def _best(self, prompt: int) -> Tensor:
        row = self.corpus.rows[prompt]
        row = row[row >= 0]
        return row[self.corpus.labels[row] == self.corpus.labels[row].max()]

    def _scored(self, chosen: Tensor) -> Tensor:
        with torch.no_grad():
            sequences = [self.corpus.sequences[i] for i in chosen.tolist()]
            return seq_logp(self.model, sequences, self.protocol.exam_batch)


def _sequences(tokens: corpus.Corpus, prompts: Sequence[int]) -> Tensor:
    rows = tokens.rows[list(prompts)]
    return rows[rows >= 0]
