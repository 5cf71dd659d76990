# SPDX-License-Identifier: Apache-2.0
"""Fits one layer's constants from the queries, keys and values of a calibration text.

Only second moments are gathered, so the text may be any length, arrive in any pieces, and be
split over ranks by kv head.

A vector x is stored through z = A x. Let C = E[x x'] and let G weigh an error e of x by e' G e:
for keys G = E[q q'], the mean square error of a score; for values G = sum of W_o' W_o over the
query heads that share the kv head, the square error of the attention block's output. With

    C^1/2 G C^1/2 = U diag(h) U',      A = R diag(h^(r/2)) U' C^-1/2      (R orthonormal)

z has the moments R diag(h^r) R' and its error the weight T = R diag(h^(1-r)) R'. Rounding every
coordinate on its own costs mean(h^r) mean(h^(1-r)), least at r = 1/2. Rounding them in turn, each
compensating the errors before it, costs about mean(h^r) mean(h^((1-r)/2))^2, least at r = 1/3;
clipping and the token's own scale move the measured optimum to about 1/4. R is the Hadamard
rotation: it makes the coordinates alike and nearly Gaussian, so that one Lloyd-Max table fits all.

Rounding in turn follows Babai's nearest plane (Babai 1986), applied to weights by GPTQ
(Frantar et al. 2022): with T^-1 = L L' (L lower triangular) and F = diag(L)^-1 L', coordinate d's
error e moves every later coordinate j by -e F[d, j], and the total error is the sum of
e_d^2 / L[d, d]^2.
"""

from dataclasses import dataclass

import torch

from vllm.turboquant.codebook import int8_levels, unit_rms
from vllm.turboquant.constants import LEVEL_GROUP
from vllm.turboquant.formats import Format
from vllm.turboquant.rotation import rotation

SCALE_STEP = {8: 1 / 16, 4: 1 / 32, 3: 1 / 32}
"""Octaves per scale code with a fitted prior, by bits per coordinate.

At 1/64 octave, a factor of 4 either way, about 0.1 % of the scale bytes sat at the end of their
range, and such a vector is clipped. 1/32 reaches a factor of 16 and adds 0.4 % to the square error
at 4 bits; at 8 bits codes are chosen for the stored scale, so 1/16 (a factor of 256) adds 4 % to
very little."""

_RIDGE = 1e-3
"""Isotropic share added to each moment: a short text never shows every direction."""

_STRICT_ROOM = 2.0
"""How much larger than expected the largest coordinate may be, at 8 bits with strict TDSF."""

_BALANCE = {"rounded": 1 / 2, "feedback": 1 / 4}
"""The exponent r: coordinates rounded on their own (8 bits), or in turn (3 and 4 bits)."""


@dataclass
class Moments:
    """Running sums of one layer, float64. H kv heads, D head_dim, P position buckets.

    Bucket n holds positions 2**n ... 2**(n+1) - 1, the last one also those beyond. Keys and
    values at position 0 are left out: the cache keeps that token exact.
    """

    tokens: torch.Tensor  # [P]
    positions: torch.Tensor  # [P], sum of positions
    queries: torch.Tensor  # [H, D, D], sum of q q' over the query heads of a kv head
    keys: torch.Tensor  # [P, H, D]
    key_products: torch.Tensor  # [P, H, D, D], sum of k k'
    value_products: torch.Tensor  # [P, H, D, D], sum of v v'

    @classmethod
    def zeros(cls, kv_heads: int, head_dim: int, longest: int) -> "Moments":
        """Nothing seen yet; `longest` is the number of tokens of the longest sequence to come."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        p, matrix = max(longest - 1, 1).bit_length(), (kv_heads, head_dim, head_dim)
        return cls(
            tokens=empty(p),
            positions=empty(p),
            queries=empty(*matrix),
            keys=empty(p, kv_heads, head_dim),
            key_products=empty(p, *matrix),
            value_products=empty(p, *matrix),
        )

    def add(self, query, key, value, positions) -> None:
        """Add T tokens: query [T, Hq, D] and key [T, H, D] after RoPE, value [T, H, D], any
        float dtype; positions: integers [T] in their sequences. Non-finite tokens are left out.
        """
        rows = [x.detach().double().cpu() for x in (query, key, value)]
        at = positions.cpu().long()
        keep = at > 0
        for x in rows:
            keep &= x.flatten(1).isfinite().all(-1)
        q, k, v = (x[keep] for x in rows)
        at = at[keep]
        q = q.unflatten(1, (k.shape[1], -1))
        self.queries += torch.einsum("thgd,thge->hde", q, q)
        bucket = torch.log2(at.double()).long().clamp_max(len(self.tokens) - 1)
        for b in bucket.unique().tolist():
            here = bucket == b
            kb, vb = k[here], v[here]
            self.tokens[b] += len(kb)
            self.positions[b] += at[here].sum()
            self.keys[b] += kb.sum(0)
            self.key_products[b] += torch.einsum("thd,the->hde", kb, kb)
            self.value_products[b] += torch.einsum("thd,the->hde", vb, vb)


def output_metric(o_weight: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """What an error of a value costs in the attention block's output: float64 [H, D, D].

    o_weight: [hidden, Hq * D], the output projection's weight; the query heads of one kv head
    are consecutive.
    """
    w = o_weight.detach().double().cpu().reshape(len(o_weight), kv_heads, -1, head_dim)
    return torch.einsum("nhgd,nhge->hde", w, w)


def _ridge(m: torch.Tensor) -> torch.Tensor:
    """m plus a small isotropic part; the identity where m is zero."""
    mean = m.diagonal(dim1=-2, dim2=-1).mean(-1)
    share = torch.where(mean > 0, _RIDGE * mean, 1.0)
    return m + share[..., None, None] * torch.eye(m.shape[-1], dtype=m.dtype)


def _root(m: torch.Tensor, exponent: float) -> torch.Tensor:
    w, u = torch.linalg.eigh(m)
    return (u * w[..., None, :] ** exponent) @ u.mT


def balance(moment: torch.Tensor, metric: torch.Tensor, exponent: float) -> torch.Tensor:
    """The transform A of the module docstring, scaled so that E[|z|^2] = D.

    moment, metric: C and G, float64 [H, D, D], positive semidefinite. Returns float64 [H, D, D].
    """
    moment, metric = _ridge(moment), _ridge(metric)
    root = _root(moment, 0.5)
    h, u = torch.linalg.eigh(root @ metric @ root)
    power = (h / h.amax(-1, keepdim=True)).clamp_min(1e-9) ** exponent
    power = power / power.mean(-1, keepdim=True)
    turn = rotation(moment.shape[-1])
    return turn @ (power.sqrt()[..., None] * u.mT) @ _root(moment, -0.5)


def error_metric(transform: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """T = A^-T G A^-1, the metric of an error of z; its mean diagonal is 1."""
    back = torch.linalg.inv(transform)
    t = back.mT @ _ridge(metric) @ back
    return t / t.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def feedback(metric: torch.Tensor) -> torch.Tensor:
    """How rounding errors are passed on, for an error metric T [H, D, D].

    Above the diagonal: F[d, j], what an error of coordinate d takes from coordinate j > d.
    On it: the weight of the squared error that is left. Below: zero.
    """
    upper = torch.linalg.cholesky(torch.linalg.inv(metric)).mT
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    f = upper / diagonal[..., None]
    f.diagonal(dim1=-2, dim2=-1).copy_(diagonal**-2)
    return f


def fit_prior(position: torch.Tensor, scale: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The curve a * exp(-b i) + c nearest to scale, in relative error weighted by tokens.

    position, tokens: float64 [P]; scale: float64 [H, P], positive. b comes from a grid of decay
    lengths from half a token to the longest position; a and c are linear least squares then.
    Returns float64 [H, 3], positive as a curve at every position >= 0.
    """
    longest = max(float(position.max()), 2.0)
    best_error = torch.full((len(scale),), torch.inf, dtype=torch.float64)
    best = torch.zeros(len(scale), 3, dtype=torch.float64)
    flat = (tokens / scale).sum(-1) / (tokens / scale**2).sum(-1)  # a = 0
    lengths = torch.logspace(-0.3, float(torch.tensor(longest).log10()), 40, dtype=torch.float64)
    for decay in [0.0, *(1 / lengths).tolist()]:
        curve = torch.exp(-decay * position)
        if decay == 0:
            a, c = torch.zeros_like(flat), flat
        else:
            basis = torch.stack([curve / scale, 1 / scale], -1) * tokens.sqrt()[:, None]
            target = tokens.sqrt().expand_as(scale)[..., None]
            normal = basis.mT @ basis
            normal = normal + 1e-9 * torch.diag_embed(normal.diagonal(dim1=-2, dim2=-1))
            a, c = torch.linalg.solve(normal, basis.mT @ target)[..., 0].unbind(-1)
        error = (tokens * ((a[:, None] * curve + c[:, None]) / scale - 1) ** 2).sum(-1)
        usable = (c > flat / 8) & (a + c > flat / 8) & (error < best_error)
        best_error = torch.where(usable, error, best_error)
        found = torch.stack([a, torch.full_like(a, decay), c], -1)
        best = torch.where(usable[:, None], found, best)
    return best


def _side(products, tokens, positions, metric, bits: int, strict: bool) -> dict[str, torch.Tensor]:
    """Transform, error metric, feedback, levels and prior of the keys or of the values.

    products: float64 [P, H, D, D], sums of x x' per position bucket; tokens: [P], positions: [P]
    their count and mean position, all positive; metric: [H, D, D].
    """
    heads, dim = metric.shape[:2]
    exponent = _BALANCE["feedback" if bits < 8 else "rounded"]
    a = balance(products.sum(0) / tokens.sum(), metric, exponent)
    energy = torch.einsum("hij,phjk,hik->hp", a, products, a) / tokens / dim
    floor = 1e-12 * energy.amax(-1, keepdim=True).clamp_min(1e-30)
    rms = energy.clamp_min(floor).sqrt()
    if bits < 8:
        table = int8_levels(bits)
        t = error_metric(a, metric)
        scale = rms / unit_rms(bits)
    else:
        table = torch.empty(0, dtype=torch.int8)
        t = torch.eye(dim, dtype=torch.float64).expand(heads, -1, -1)
        # The largest of D Gaussians is about sqrt(2 ln D) sigma.
        scale = rms * (2 * torch.tensor(float(dim)).log()).sqrt() / 127
        if strict:  # no byte tells of a larger vector, so the formula must leave room for it
            scale = scale * _STRICT_ROOM
    return {
        "in": a,
        "inverse": torch.linalg.inv(a),
        "metric": t,
        "feedback": feedback(t),
        "levels": table.expand(heads, dim // LEVEL_GROUP, -1).contiguous(),
        "prior": fit_prior(positions, scale, tokens),
    }


def fit_layer(
    fmt: Format,
    moments: Moments,
    value_metric: torch.Tensor,
    *,
    key_bias: torch.Tensor | None = None,
    strict: bool = False,
) -> dict[str, torch.Tensor]:
    """The constants of one layer, by name, as `LayerConstants` takes them.

    value_metric: float64 [H, D, D], see `output_metric`. key_bias: [H, D], what was taken out of
    the keys in `moments`, None: nothing. strict: the formula alone is the scale. Raises ValueError
    when no token beyond the first of a sequence was added.
    """
    seen = moments.tokens > 0
    if not seen.any():
        raise ValueError("calibration saw no token after position 0; give it a longer text")
    tokens = moments.tokens[seen]
    positions = moments.positions[seen] / tokens
    sums, products = moments.keys[seen], moments.key_products[seen]
    center = sums.sum(0) / tokens.sum()
    cross = sums[..., :, None] * center[:, None, :]
    square = center[:, :, None] * center[:, None, :]
    centred = products - cross - cross.mT + tokens[:, None, None, None] * square
    key = _side(centred, tokens, positions, moments.queries, fmt.key_bits, strict)
    values = moments.value_products[seen]
    value = _side(values, tokens, positions, value_metric.double(), fmt.value_bits, strict)
    steps = [0.0 if strict else SCALE_STEP[bits] for bits in (fmt.key_bits, fmt.value_bits)]
    constants = {
        "key_center": center,
        "key_bias": torch.zeros_like(center) if key_bias is None else key_bias,
        "key_in": key["in"],
        "query_in": key["inverse"].mT,
        "key_metric": key["metric"],
        "key_feedback": key["feedback"],
        "value_in": value["in"],
        "value_out": value["inverse"],
        "value_metric": value["metric"],
        "value_feedback": value["feedback"],
        "tdsf": torch.cat([key["prior"], value["prior"]], -1),
        "scale_step": torch.tensor(steps),
    }
    constants = {name: x.float().contiguous() for name, x in constants.items()}
    return constants | {"key_levels": key["levels"], "value_levels": value["levels"]}
