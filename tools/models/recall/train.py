# SPDX-License-Identifier: Apache-2.0
"""Trains qwen3-recall: `python -m tools.models.recall.train OUTPUT.safetensors`.

Two attention layers are the least that recall needs: the first tells every token which token stands
before it, the second finds the token behind an earlier copy of this one. From noise, two cores did
not find that division of labour in the minutes they have. So the weights start as a sketch of it
(below), with noise on everything, that finds 33 % of 64 pairs in 4,096 tokens; training does the
rest: all parameters, short contexts first, the loss on values only.
"""

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.models.recall import recipe
from tools.models.recall.task import Recall, draw
from tools.models.recall.tokenizer import TEXT

# Tokens of context, pairs, contexts per step, steps.
CURRICULUM = (
    (64, 16, 16, 60),
    (256, 64, 6, 40),
    (1024, 128, 2, 32),
    (4096, 256, 1, 24),
)
RATE, WARM_UP = 1e-3, 20
NOISE = 0.02


def sketch(config: Qwen3Config, generator: torch.Generator) -> Qwen3ForCausalLM:
    """Untrained weights that lean towards recall.

    The first half of the hidden dimensions holds the token (its last coordinate is 1 for all), the
    second half is for the token before it.
    """
    model = Qwen3ForCausalLM(config).float()
    half, dim, kv_heads = config.hidden_size // 2, config.head_dim, config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    own = torch.eye(half).view(kv_heads, dim, half)  # slice g of the token, for kv head g
    nothing = torch.zeros_like(own)
    token, before = torch.cat([own, nothing], 2), torch.cat([nothing, own], 2)
    theta = config.rope_parameters["rope_theta"]
    frequency = theta ** (-torch.arange(dim // 2) / (dim // 2))

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(std=NOISE, generator=generator)
        embedding = model.model.embed_tokens.weight
        embedding[:, :half].normal_(generator=generator)
        embedding[:, half - 1] = 4.0
        model.model.norm.weight.fill_(0.15)

        first, second = (layer.self_attn for layer in model.model.layers)
        # Any query meets any key best one step back: its fast pairs are turned by one step.
        share = torch.where(frequency > 0.002, 0.25, 0.0)
        share[:2] = 1.0
        ask = 1.5 * share / share.norm()
        offer = torch.cat([ask * frequency.cos(), ask * frequency.sin()])
        for head in range(config.num_attention_heads):
            first.q_proj.weight[head * dim : (head + 1) * dim, half - 1] += torch.cat([ask, 0 * ask])
        for head in range(kv_heads):
            first.k_proj.weight[head * dim : (head + 1) * dim, half - 1] += offer
        first.v_proj.weight += token.flatten(0, 1)
        first.o_proj.weight += _out(before, group)

        # The token asks, the token before answers, through pairs that hardly turn in a context.
        slow = frequency < 1 / 4096
        slow = torch.cat([slow, slow])
        mix = torch.linalg.qr(torch.randn(kv_heads, dim, dim, generator=generator)).Q
        mix = mix * slow[:, None]
        second.q_proj.weight += (mix @ token).repeat_interleave(group, 0).flatten(0, 1)
        second.k_proj.weight += (mix @ before).flatten(0, 1)
        second.v_proj.weight += token.flatten(0, 1)
        second.o_proj.weight += 2 * _out(token, group)
        # Scores that can stand out among 4,096.
        for attention, gain in ((first, 2.5), (second, 2.0)):
            attention.q_norm.weight.fill_(gain)
            attention.k_norm.weight.fill_(gain)
    return model


def _out(place: torch.Tensor, group: int) -> torch.Tensor:
    """Output projection [hidden, heads * dim] that puts kv head g's value where place[g] reads."""
    return place.repeat_interleave(group, 0).flatten(0, 1).T / group


def predict(model: Qwen3ForCausalLM, task: Recall, queries: int) -> torch.Tensor:
    """Logits of the values of the first `queries` keys, asked one after the other:
    [B, queries, vocabulary]."""
    hidden = model.model(task.asked(queries), use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, task.context.shape[1] :: 2])


def train(seed: int) -> Qwen3ForCausalLM:
    """A trained model. Prints its progress."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = sketch(Qwen3Config(**recipe.CONFIG), generator)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    plan = [stage for *stage, steps in CURRICULUM for _ in range(steps)]
    right = asked = 0
    for step, (length, pairs, batch) in enumerate(plan):
        rate = RATE * min((step + 1) / WARM_UP, 1.0) * (1.05 - step / len(plan))
        for group in optimizer.param_groups:
            group["lr"] = rate
        task = draw(batch, length, pairs, TEXT, generator)
        logits = predict(model, task, pairs)
        loss = functional.cross_entropy(logits.flatten(0, 1), task.values.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right += (logits.argmax(-1) == task.values).sum().item()
        asked += task.values.numel()
        if step % 10 == 9 or step == 0 or step + 1 == len(plan):
            print(
                f"step {step + 1:4} of {len(plan)}  context {length:4}  loss {loss.item():.4f}  "
                f"right {100 * right / asked:6.2f} %  {time.process_time():.0f} s of CPU time",
                flush=True,
            )
            right = asked = 0
    return model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.models.recall.train", description=__doc__)
    parser.add_argument("output", type=Path, help="weights, bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    model = train(args.seed)
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # the embedding
    }
    save_file(weights, args.output, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
