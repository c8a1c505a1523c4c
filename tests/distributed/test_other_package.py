"""pytorch_lightning is another package with classes of its own; who mixes them is told which to use."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pytorch_lightning")

GIVE_TO_ITS_TRAINER = """
{imports}
for strategy in ({strategy}):
    try:
        pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1)
    except ValueError as error:
        print(error)
"""


def said(imports: str, strategy: str) -> list[str]:
    code = GIVE_TO_ITS_TRAINER.format(imports=imports, strategy=strategy)
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return result.stdout.splitlines()


def test_its_trainer_refuses_our_names_and_objects() -> None:
    strategies = "'hierdist', 'hierdist_spawn_find_unused_parameters_true', lightning_dist.HierDistStrategy()"
    lines = said("import pytorch_lightning, lightning_dist", strategies)
    assert len(lines) == 3
    assert all("import lightning.pytorch as pl" in line for line in lines)


def test_its_trainer_refuses_our_objects_if_imported_later() -> None:
    """Names are then unknown to it: nothing is imported, or hooked into imports, for its sake."""
    left_alone = "import sys, lightning_dist; print('pytorch_lightning' in sys.modules); import pytorch_lightning"
    imported, line = said(left_alone, "lightning_dist.HierDistStrategy(),")
    assert imported == "False"
    assert "import lightning.pytorch as pl" in line
