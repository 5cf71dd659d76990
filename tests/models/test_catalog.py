# SPDX-License-Identifier: Apache-2.0
"""Making a model: once, whole, and again when its source or recipe changes."""

import hashlib

import pytest

from tools.cache import new_folder
from tools.errors import Problem
from tools.models import catalog
from tools.pins import Artifact


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A catalog of one model whose package is a small file in the cache."""
    monkeypatch.setenv("VLLM_TQ_CACHE", str(tmp_path))
    package = tmp_path / "downloads" / "package.whl"
    package.parent.mkdir()
    package.write_bytes(b"package")
    artifact = Artifact("package", package.name, hashlib.sha256(b"package").hexdigest())
    monkeypatch.setattr(catalog.Pins, "model", lambda self, name: artifact)
    calls = []

    def make(source, folder):
        calls.append(source)
        (folder / "config.json").write_text("{}")

    monkeypatch.setitem(catalog.CATALOG, "small", catalog.Recipe("Small", 1, make))
    return calls


def test_a_model_is_made_once(made, tmp_path):
    folder = catalog.make("small")
    assert folder == tmp_path / "models" / "Small" and (folder / "config.json").exists()
    assert catalog.make("small") == folder and len(made) == 1


def test_a_newer_recipe_makes_it_again(made, monkeypatch):
    catalog.make("small")
    recipe = catalog.CATALOG["small"]
    monkeypatch.setitem(
        catalog.CATALOG, "small", catalog.Recipe(recipe.folder, 2, recipe.make)
    )
    catalog.make("small")
    assert len(made) == 2


def test_a_recipe_that_fails_leaves_the_old_folder_and_no_other(made, tmp_path, monkeypatch):
    catalog.make("small")

    def fail(source, folder):
        (folder / "config.json").write_text("half")
        raise RuntimeError("broken off")

    monkeypatch.setitem(catalog.CATALOG, "small", catalog.Recipe("Small", 2, fail))
    with pytest.raises(RuntimeError, match="broken off"):
        catalog.make("small")
    assert (tmp_path / "models" / "Small" / "config.json").read_text() == "{}"
    assert not (tmp_path / "models" / "Small.part").exists()


def test_the_rest_of_a_killed_conversion_is_thrown_away(tmp_path):
    (tmp_path / "Small.part").mkdir()
    (tmp_path / "Small.part" / "half").write_text("")
    with new_folder(tmp_path / "Small") as folder:
        (folder / "whole").write_text("")
    assert [path.name for path in (tmp_path / "Small").iterdir()] == ["whole"]


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(Problem, match="unknown model nothing\n.*smollm2"):
        catalog.make("nothing")
