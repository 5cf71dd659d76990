# SPDX-License-Identifier: Apache-2.0
"""Profile files and the identity of models: whole or refused, with the reason."""

import dataclasses
import json
import struct

import pytest
import torch
from safetensors.torch import load, save, save_file

from vllm.turboquant import profile, registry
from vllm.turboquant.constants import uncalibrated
from vllm.turboquant.formats import FORMATS
from vllm.turboquant.identity import ModelIdentity, identify

FMT = FORMATS["tdsf_k4v3"]
MODEL = ModelIdentity("LlamaForCausalLM", "0123456789abcdef", "fedcba9876543210")


def sample(model=MODEL) -> profile.Profile:
    layers = {f"model.layers.{i}.self_attn.attn": uncalibrated(FMT, 2, 32) for i in range(2)}
    return profile.Profile(model, FMT, layers, {"tokens": 7}, {"kl": 0.01})


def header_of(content: bytes) -> dict:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["vllm_tq_profile"])


def rebuilt(change_tensors=None, **header) -> bytes:
    """The sample's file with changed tensors or header entries, and a right checksum."""
    content = sample().to_bytes()
    tensors, fields = load(content), header_of(content)
    if change_tensors:
        change_tensors(tensors)
        ordered = [f"{layer}/{name}" for layer in fields["layers"] for name in profile.TENSORS]
        digest = profile.hashlib.sha256()
        for name in ordered:
            if name in tensors:
                digest.update(tensors[name].contiguous().numpy().tobytes())
        fields["sha256"] = digest.hexdigest()
    fields = {name: x for name, x in (fields | header).items() if x is not None}
    return save(tensors, {"vllm_tq_profile": json.dumps(fields)})


def put(name, value):
    return lambda tensors: tensors.__setitem__(f"model.layers.1.self_attn.attn/{name}", value)


def test_a_profile_comes_back(tmp_path):
    path = tmp_path / "new" / "a.safetensors"
    profile.write(sample(), path)
    back = profile.read(path)
    assert (back.model, back.format, back.quality) == (MODEL, FMT, {"kl": 0.01})
    assert back.to_bytes() == sample().to_bytes() == path.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


GARBLED = {
    "empty": (b"", "not a safetensors"),
    "text": (b"no profile at all", "not a safetensors"),
    "pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR.", "not a safetensors"),
    "a huge header": (struct.pack("<Q", 1 << 60) + b"{}", "not a safetensors"),
    "a plain model": (save({"x": torch.zeros(2)}), "holds no 'vllm_tq_profile'"),
    "no JSON": (save({"x": torch.zeros(2)}, {"vllm_tq_profile": "{"}), "entry in JSON"),
    "nested JSON": (save({"x": torch.zeros(2)}, {"vllm_tq_profile": "[" * 10**5}), "in JSON"),
    "a list": (save({"x": torch.zeros(2)}, {"vllm_tq_profile": "[]"}), "no JSON object"),
    "another version": (rebuilt(version=99), "version is 99"),
    "no version": (rebuilt(version=None), "version is None"),
    "no model": (rebuilt(model=None), "lacks or garbles"),
    "a strange model": (rebuilt(model={"name": "x"}), "lacks or garbles"),
    "another format": (rebuilt(format="tdsf_k9v9"), "lacks or garbles"),
    "layers as text": (rebuilt(layers="ab"), "not those of the layers"),
    "no layers": (rebuilt(layers=[]), "not those of the layers"),
    "a layer twice": (rebuilt(layers=2 * ["model.layers.0.self_attn.attn"]), "not those"),
    "another checksum": (rebuilt(sha256="0" * 64), "do not match their checksum"),
    "NaN": (rebuilt(put("tdsf", torch.full((2, 6), torch.nan))), "not finite"),
    "a negative scale": (rebuilt(put("tdsf", -torch.ones(2, 6))), "not positive"),
    "a growing scale": (rebuilt(put("tdsf", torch.tensor(2 * [[1, -1, 1, 1, 0, 1.0]]))), "not pos"),
    "a wild step": (rebuilt(put("scale_step", torch.tensor([8.0, 1 / 8]))), "scale_step"),
    "a step for keys only": (rebuilt(put("scale_step", torch.tensor([0, 1 / 8]))), "zero in some"),
    "doubles": (rebuilt(put("tdsf", torch.ones(2, 6).double())), "float64"),
    "a missing head": (rebuilt(put("value_in", torch.eye(32)[None].clone())), "value_in has shape"),
    "a flat table": (rebuilt(put("key_levels", torch.zeros(2, 2, dtype=torch.int8))), "dimensions"),
    "few levels": (rebuilt(put("key_levels", torch.zeros(2, 2, 8, dtype=torch.int8))), "4 bits"),
    "equal levels": (rebuilt(put("key_levels", torch.zeros(2, 2, 16, dtype=torch.int8))), "ascend"),
    "a singular basis": (rebuilt(put("key_in", torch.zeros(2, 32, 32))), "does not undo"),
    "head_dim 33": (rebuilt(put("key_center", torch.zeros(2, 33))), "dimension 33"),
}


@pytest.mark.parametrize("kind", GARBLED)
def test_a_garbled_file_is_refused_with_its_name(tmp_path, kind):
    content, reason = GARBLED[kind]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s)bad.safetensors.*{reason}"):
        profile.read(path)


def test_no_truncation_and_no_flipped_byte_passes(tmp_path):
    path, content = tmp_path / "cut.safetensors", sample().to_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for cut in (0, 4, 8, 100, 8 + length, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match="cut.safetensors"):
            profile.read(path)
    for at in range(8 + length, len(content), (len(content) - length) // 50):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match="cut.safetensors"):
            profile.read(path)


def test_a_profile_of_another_model_is_refused_with_both_names(tmp_path):
    path = tmp_path / "a.safetensors"
    profile.write(sample(), path)
    other = dataclasses.replace(MODEL, weights="0" * 16)
    with pytest.raises(ValueError) as refusal:
        registry.open_profile(path, other, FMT)
    assert str(MODEL) in str(refusal.value) and str(other) in str(refusal.value)
    with pytest.raises(ValueError, match="cannot be identified"):
        registry.open_profile(path, None, FMT)
    with pytest.raises(ValueError, match="profile for tdsf_k4v3, the cache is tdsf_k4v4"):
        registry.open_profile(path, MODEL, FORMATS["tdsf_k4v4"])
    assert registry.open_profile(path, other, FMT, any_model=True).model == MODEL


def test_the_registry_finds_by_identity_and_format(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_TQ_CACHE", str(tmp_path))
    assert registry.find(MODEL, FMT) is None
    profile.write(sample(), registry.cached_path(MODEL, FMT))
    assert registry.find(MODEL, FMT) == registry.cached_path(MODEL, FMT)
    assert registry.find(MODEL, FORMATS["tdsf_k4v4"]) is None
    assert registry.find(dataclasses.replace(MODEL, config="0" * 16), FMT) is None


def a_model(folder, config=(), **tensors):
    folder.mkdir()
    settings = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8} | dict(config)
    (folder / "config.json").write_text(json.dumps(settings))
    weights = {"a": torch.ones(40, 40), "b": torch.ones(3)} | tensors
    save_file(weights, folder / "model.safetensors")
    return folder


def test_identity_follows_config_and_weights_alone(tmp_path):
    base = identify(a_model(tmp_path / "base"))
    assert identify(a_model(tmp_path / "copy")) == base
    assert identify(a_model(tmp_path / "dtype", {"torch_dtype": "float16"})) == base
    assert identify(a_model(tmp_path / "config", {"rope_theta": 7})).weights == base.weights
    assert identify(tmp_path / "config").config != base.config
    for name, change in {
        "one tensor": {"b": torch.tensor([1.0, 1.0, 1.5])},
        "another name": {"c": torch.ones(3)},
        "another shape": {"a": torch.ones(20, 80)},
    }.items():
        other = identify(a_model(tmp_path / name, **change))
        assert other.config == base.config and other.weights != base.weights


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, struct.pack("<Q", 4) + b"[1 ]" + b"\0" * 9])
def test_malformed_weights_have_no_identity(tmp_path, content):
    folder = a_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        identify(folder)


def test_a_folder_without_a_model_has_no_identity(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        identify(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["../../x"]}')
    with pytest.raises(ValueError, match="names no architecture"):
        identify(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    with pytest.raises(ValueError, match="no weight files"):
        identify(tmp_path)
