# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face Transformers says in float32, and how far an engine's answer is from it."""

from dataclasses import dataclass

import torch
import transformers


class Reference:
    """A model folder's logits, one sequence at a time."""

    def __init__(self, folder) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        architecture = getattr(transformers, config.architectures[0])
        self.model = architecture.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def _scores(self, ids: torch.Tensor) -> torch.Tensor:
        """[T - 1, V]: log-probabilities of what follows each token of `ids` [T] but the last."""
        return self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)

    def least_gap(self, prompt: list[int], tokens: list[int]) -> float:
        """How near this continuation comes to a tie: the least distance, over its steps, of the
        best token from the second best, in nats."""
        best = self._scores(torch.tensor(prompt + tokens))[len(prompt) - 1 :].topk(2).values
        return float((best[:, 0] - best[:, 1]).min())

    def compare(self, prompt: list[int], answer: dict) -> "Distance":
        """Both see the prompt and the tokens that the engine chose, so one flip stays one flip."""
        ids = torch.tensor(prompt + answer["tokens"])
        scores = self._scores(ids)
        ours = torch.tensor(answer["given"] + answer["logprobs"])
        theirs = scores.gather(1, ids[1:, None])[:, 0]
        top = torch.tensor(answer["top"] + answer["tokens"])
        lost = scores.max(dim=1).values - scores.gather(1, top[:, None])[:, 0]
        return Distance((ours - theirs).abs(), lost)


@dataclass(frozen=True)
class Distance:
    """Per position: error of a log-probability, and by how much the engine's first choice is worse
    than the reference's, in nats. The latter is 0 where they choose the same token."""

    error: torch.Tensor
    lost: torch.Tensor

    @staticmethod
    def of(parts: list["Distance"]) -> "Distance":
        return Distance(torch.cat([p.error for p in parts]), torch.cat([p.lost for p in parts]))

    def within(self, mean: float, most: float) -> bool:
        """Whether errors keep to `mean` and, for 99 of 100 positions, to `most`; and so do first
        choices. The rest are cascades: a token that goes to another expert, a code that flips."""
        parts = (self.error.quantile(0.99), self.lost.quantile(0.99))
        return bool(self.error.mean() < mean and max(parts) < most)

    def __str__(self) -> str:
        return (
            f"{len(self.error)} positions: error mean {self.error.mean():.5f}, 99 % "
            f"{self.error.quantile(0.99):.5f}, max {self.error.max():.5f}; other first choice {(self.lost > 0).float().mean():.4f}, "
            f"worse by at most {self.lost.max():.5f}"
        )
