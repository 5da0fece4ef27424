"""What the tests of models share."""

import pytest
import torch
from harness.pipelines import scalar_code

__all__ = ["scalar_code"]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Every graph that is traced; it runs as it is."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch._inductor, "compile", keep)
    return graphs
