"""``hierdist doctor`` around scripts that know nothing of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_dist.monitor.record import Phase
from lightning_dist.monitor.run_files import read_run
from tests.support.fresh import run_script
from tests.support.sweeps import sampled

SCRIPT = Path(__file__).parent / "apps" / "plain_training.py"
DOCTOR = ["-m", "lightning_dist.cli", "doctor", "--output", "examined"]
STEPS = 25
CASES = {
    "ddp": ([sys.executable, "{script}"], ""),
    "ddp_spawn": ([sys.executable, "{script}", "ddp_spawn"], ""),
    "torchrun": ([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "{script}"], ""),
    "hierdist": ([sys.executable, "{script}", "hierdist_zero2"], "import lightning_dist\n"),
    "other package": ([sys.executable, "{script}"], "pytorch_lightning"),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("command", "change"), sampled(CASES, always=["ddp"]))
def test_a_script_is_examined_unedited(tmp_path: Path, command: list[str], change: str) -> None:
    script = tmp_path / "script.py"
    text = SCRIPT.read_text()
    if change == "pytorch_lightning":
        text = text.replace("lightning.pytorch", change)
    elif change:
        text = text.replace("import sys\n", f"import sys\n{change}", 1)
    script.write_text(text)
    (tmp_path / "final.ckpt").write_text("precious")
    words = [word.format(script=script) for word in command]
    result = run_script(
        [*DOCTOR, "--steps", str(STEPS), "--", *words], cwd=tmp_path, deadline_s=240, env={"COLUMNS": "200"}
    ).check()

    record = read_run(tmp_path / "examined" / "monitor")
    assert {rank: len(each.steps) for rank, each in record.ranks.items()} == {0: STEPS, 1: STEPS}
    assert all(step.phases[Phase.FORWARD] for each in record.ranks.values() for step in each.steps)
    assert record.ranks[0].series("memory"), "the machine was sampled"
    assert "verdict" in result.output
    assert "each of 2 ranks holds all of TensorDataset" in result.output
    assert "report: examined/report.html" in result.output
    assert "<html" in (tmp_path / "examined" / "report.html").read_text()

    assert "the script went on" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["examined", "final.ckpt", "script.py"]
    assert (tmp_path / "final.ckpt").read_text() == "precious"
    assert sorted(path.name for path in (tmp_path / "examined").iterdir()) == ["monitor", "report.html"]
