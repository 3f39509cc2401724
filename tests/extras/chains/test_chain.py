from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import Trainer

from hetero_framework import control
from hetero_framework.config import TrainingConfig
from hetero_framework.engine.optimizer import build_optimizer
from hetero_framework.errors import ArchitectureError, DataError, ModelError
from hetero_framework.extras.chains.chain import (
    ChainConfig,
    ChainModel,
    bundles,
    child_flops,
    made,
    modules_of,
)
from hetero_framework.extras.chains.chain_objective import ChainLoss
from hetero_framework.extras.chains.chain_shard import build_chain
from hetero_framework.models.cut.introspect import introspect, layer_kinds
from hetero_framework.models.cut.partition import ShardRange, ranges_between
from hetero_framework.models.verify.equivalence import compare

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FORMS = {"input": ((3,), "float32"), "target": ((), "int64")}


@pytest.fixture
def having(monkeypatch):
    """Have an imported file with these names."""
    modules: list[Any] = []
    monkeypatch.setattr(control, "_modules", modules)
    monkeypatch.setattr(control, "_imported", [])
    return lambda **names: modules.append(SimpleNamespace(**names))


class Returning(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Any) -> Any:
        return self.value(x)


def chain_of(*children: nn.Module) -> Any:
    return lambda: nn.Sequential(nn.Linear(3, 4), *children)


def built(config: ChainConfig, span: ShardRange, device: str = "cpu") -> Any:
    how: Any = {"dtype": torch.float32, "device": torch.device(device), "seed": 0}
    return build_chain(config, span, **how)


WRONG = {
    "tuple": (lambda x: (x, x), "child 1 .Returning. of the chain 'mine' returns cannot go"),
    "nothing": (lambda x: {}, "holds nothing"),
    "member": (lambda x: {"a": x, "b": 3}, "it holds int"),
    "unnamed": (lambda x: {"": x, "b": x}, "has a member whose name is no text"),
    "integer": (lambda x: x.long(), "torch.int64, which has no gradient"),
    "rows": (lambda x: {"a": x, "b": x[:1]}, "first axis is not that of the examples"),
    "scalar": (lambda x: x.sum(), "first axis"),
    "fails": (lambda x: x @ x, "does not take 4 of float32, what child 0 returns for an example"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_cross_is_said_before_the_run(case, having):
    value, message = WRONG[case]
    having(mine=chain_of(Returning(value)))
    with pytest.raises(ArchitectureError, match=message):
        bundles(ChainConfig("mine", FORMS, case))


def test_a_child_that_does_not_fit_is_said_without_torchs_traceback(having, caplog, capfd):
    having(mine=lambda: nn.Sequential(nn.Linear(5, 4)))
    with pytest.raises(ArchitectureError, match=r"child 0 .Linear.* 3 of float32, what an example"):
        bundles(ChainConfig("mine", FORMS, "unfit"))
    assert not caplog.records
    assert "Traceback" not in capfd.readouterr().err


def test_a_target_that_the_loss_refuses_is_shown_with_the_users_line(having, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch.nn.functional import cross_entropy\n"
        "def loss(output, target):\n"
        "    return cross_entropy(output, target)\n"
    )
    control.import_file(tmp_path / "mine.py")
    objective = ChainLoss(TrainingConfig(objective="sequential"))
    output, target = torch.zeros(3, 10), torch.tensor([2, 10, 4])
    said = r"fails: .*mine.py, line 3: .*\n.* target 2 to 10"
    with pytest.raises(DataError, match=said) as error:
        objective.called(ChainConfig("mine", FORMS, "loss"), output, target)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "no imported file has that name"),
        (nn.Linear(1, 1), "has to be an nn.Sequential.* it is Linear"),
        (nn.Sequential(), "an empty one"),
        (lambda: 1 / 0, "fails: ZeroDivisionError"),
    ],
)
def test_a_chain_that_is_none_is_refused(found, message, having):
    if found is not None:
        having(mine=found)
    with pytest.raises(ModelError, match=message):
        made("mine")


def test_another_shape_than_that_of_the_first_example_is_refused(having):
    having(mine=chain_of(Returning(lambda x: x if len(x) == 3 else torch.cat([x, x], 1))))
    shard = built(ChainConfig("mine", FORMS, "grows"), ShardRange(0, 2, True, True))
    with pytest.raises(ArchitectureError, match="returns tensors of other shapes"):
        shard.forward({"input": torch.zeros(2, 3)}, ())


def test_the_second_stage_knows_what_may_arrive(having):
    having(mine=chain_of(Returning(lambda x: {"a": x, "n": x.argmax(1)}), nn.Identity()))
    shard = built(ChainConfig("mine", FORMS, "arrival"), ShardRange(2, 3, False, True), "meta")
    a, n = ((2, 4), torch.float32, False), ((2,), torch.int64, False)
    assert shard.arrival_problem([a, n], None) is None
    assert shard.arrival_problem([a], None) == "1 tensors came, expected 2"
    problem = shard.arrival_problem([((2, 5), torch.float32, False), n], None)
    assert problem == "a is 2 x 5 of float32, expected 2 x 4 of float32"
    assert "n is 3 of int64" in str(shard.arrival_problem([a, ((3,), torch.int64, False)], None))


def test_a_weight_of_two_stages_is_refused(having):
    layer = nn.Linear(3, 3)
    having(mine=nn.Sequential(layer, nn.ReLU(), layer))
    config = ChainConfig("mine", FORMS, "shared")
    with pytest.raises(ArchitectureError, match="is also that of another stage"):
        built(config, ShardRange(0, 1, True, False))
    assert len(bundles(config)) == 4
    assert compare(config, ranges_between([0, 3])).verdict == "bit-equal"


def test_children_of_one_kind_take_the_same_input(having):
    convolution = nn.Conv2d(3, 3, 3, padding=1)
    having(mine=lambda: nn.Sequential(convolution, nn.AvgPool2d(2), nn.Conv2d(3, 3, 3, padding=1)))
    config = ChainConfig("mine", {"input": ((3, 8, 8), "float32")}, "kinds")
    assert layer_kinds(config) == [0, 1, 2]
    assert [child_flops(config, k, 5) for k in range(3)] == [2 * 5 * 64 * 81, 0, 2 * 5 * 16 * 81]
    assert introspect(config).num_layers == 3


def test_chains_differ_by_their_modules(having):
    having(mine=chain_of())
    first = modules_of("mine")
    assert modules_of("mine") == first
    having(mine=chain_of(nn.ReLU()))
    assert modules_of("mine") != first


def test_a_chain_that_no_function_makes_stays_as_it_is_given(having):
    """Comparing, sizing and building work on copies: no hook, gradient or mean is left in it."""
    chain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in chain.state_dict().items()}
    having(mine=chain)
    config = ChainConfig("mine", FORMS, digest := modules_of("mine"))
    assert introspect(config).num_layers == 4
    assert compare(config, ranges_between([0, 2, 4])).verdict == "bit-equal"
    assert child_flops(config, 0, 5) == 2 * 5 * 12
    assert all(torch.equal(before[name], t) for name, t in chain.state_dict().items())
    assert all(p.grad is None for p in chain.parameters())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in chain)
    assert modules_of("mine") == digest
    with torch.no_grad():
        chain[0].bias[0] += 1
    assert modules_of("mine") != digest


class Peeking(nn.Module):
    """Reads what another child has left."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left: torch.Tensor = getattr(self.other[0], "left", torch.zeros(()))
        return x + left


class Leaving(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left = x.detach().sum()
        return x


def test_a_way_around_the_boundaries_is_found(having):
    def peeking() -> nn.Sequential:
        leaving = Leaving()
        return nn.Sequential(nn.Linear(3, 3), leaving, Peeking(leaving))

    having(mine=peeking)
    config = ChainConfig("mine", FORMS, "peeking")
    assert compare(config, ranges_between([0, 3])).passed
    result = compare(config, ranges_between([0, 2, 3]))
    assert not result.passed
    assert "differs from that of the whole" in result.reason


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_the_examples_are_cut_to_the_bit(name, having):
    control.import_file(EXAMPLES / f"{name}.py")
    forms = {"input": ((3, 16, 16), "float32"), "target": ((), "int64")}
    config = ChainConfig(name, forms, modules_of(name))
    assert compare(config, ranges_between([0, 1, 2, 4, 5, 6])).verdict == "bit-equal"


class Named(nn.Sequential):
    """Children whose names, their own or within, tell whether they decay."""

    def __init__(self) -> None:
        inner = nn.Sequential(OrderedDict(my_norm=nn.Linear(4, 4), bias=nn.Linear(4, 4)))
        children = {"first": nn.Linear(3, 4), "norm": nn.RMSNorm(4), "layernorm": nn.Linear(4, 4)}
        super().__init__(OrderedDict(children, ln=nn.LayerNorm(4), norms=nn.RMSNorm(4), sub=inner))


def test_names_of_a_chains_children_tell_what_decays(having):
    having(mine=Named)
    model = ChainModel(ChainConfig("mine", FORMS, "named"))
    optimizer = build_optimizer(TrainingConfig(weight_decay=0.1), model, [*model.parameters()])
    decayed, _ = (list(map(id, group["params"])) for group in optimizer.param_groups)
    users = model.users_names(dict(model.named_parameters()))
    found = [name for name, parameter in users.items() if id(parameter) in decayed]
    expected = Trainer.get_decay_parameter_names(cast(Any, None), Named())
    assert sorted(found) == sorted(expected) == ["first.weight", "norms.weight"]
