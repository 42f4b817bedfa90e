"""Former public names: each still is what it was, says so once, and nothing of the package uses one."""

import importlib
import subprocess
import sys

import pytest
import torch

import adpo
from adpo.deprecated import RENAMED


def resolved(path):
    found = adpo
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_former_name_is_the_new_thing_with_a_warning(old, new):
    module, name = old.rsplit(".", 1)
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}") as warned:
        found = getattr(importlib.import_module(module), name)
    assert found is resolved(new)
    assert [warning.filename for warning in warned] == [__file__]


def test_former_names_can_be_imported():
    with pytest.warns(DeprecationWarning, match="old name will be removed"):
        from adpo import soft
    with pytest.warns(DeprecationWarning, match="old name will be removed"):
        from adpo.anchors import Self
    assert (soft, Self) == (adpo.targets.soft, adpo.anchors.Snapshot)


@pytest.mark.parametrize("module", sorted({old.rsplit(".", 1)[0] for old in RENAMED}))
def test_a_name_that_never_was_is_an_error(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'zebra'"):
        importlib.import_module(module).zebra  # noqa: B018


def test_former_names_are_not_listed():
    assert not {old.rsplit(".", 1)[1] for old in RENAMED if old.count(".") == 1} & set(adpo.__all__)


def test_the_anchor_that_lent_its_weights():
    policy = torch.nn.Linear(1, 1)
    with pytest.warns(DeprecationWarning, match="use_weights"), adpo.anchors.Snapshot(policy).lent() as module:
        assert module is policy


def test_the_package_itself_warns_of_nothing():
    program = (
        "import adpo, adpo.bench.core, adpo.experiments.demo, adpo.experiments.bandits.methods, "
        "adpo.experiments.distill.methods, adpo.experiments.geometry.shapes, adpo.trainers.coordinates"
    )
    subprocess.run([sys.executable, "-W", "error:adpo:DeprecationWarning", "-c", program], check=True)
