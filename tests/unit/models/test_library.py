import pytest
import torch

from hetero_framework.models.library import compiled_at_first_call


def test_compilation_in_imports_waits_for_the_first_call(monkeypatch):
    compiled = []

    def compile_now(function, **options):
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_now)
    with compiled_at_first_call():

        @torch.compile
        def double(x):
            return 2 * x

        @torch.compile(dynamic=False)
        def half(x, by=2):
            return x // by

    assert torch.compile is compile_now
    assert compiled == []
    assert (double(3), double(4), half(9, by=3)) == (6, 8, 3)
    assert compiled == [("double", {}), ("half", {"dynamic": False})]
    assert half.__name__ == "half"


def test_a_failed_import_leaves_the_compiler_as_it_was():
    before = torch.compile
    with pytest.raises(ImportError), compiled_at_first_call():
        raise ImportError("peft")
    assert torch.compile is before
