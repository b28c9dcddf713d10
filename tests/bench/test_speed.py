"""The speed benchmark: its mistakes, and its tables from known steps of jobs."""

from __future__ import annotations

import pandas as pd
import pytest

from app.bench import speed
from app.bench.core import Page
from app.program import run_program


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (["--precision", "fp16"], {}, "--precision fp16: the recipes train in fp32 or bf16"),
        (["--recipes", "fast"], {}, "--recipes: invalid choice: 'fast'"),
        ([], {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "it starts jobs itself"),
    ],
)
def test_a_mistake_is_one_line(flags, variables, message, monkeypatch, capsys, tmp_path, review_csv):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    csv = str(review_csv(60))
    monkeypatch.setattr("sys.argv", ["speed", "--csv", csv, *flags])
    assert run_program(speed.main) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert not (tmp_path / "runs").exists()


def test_speed_padding_mfu_and_ratios_of_known_steps(tmp_path, capsys):
    def steps(examples, tokens, padded_tokens, seconds):
        columns = {"examples": examples, "tokens": tokens, "padded_tokens": padded_tokens, "seconds": seconds}
        return pd.Series(columns, dtype=float)

    # The mean length is 10 tokens. In the second round, the tutorial's reviews are longer than on average.
    measured = {
        (0, "ddp_loop"): steps(40, 400, 500, 2.0),
        (0, "tutorial"): steps(40, 400, 800, 4.0),
        (1, "ddp_loop"): steps(40, 320, 400, 1.0),
        (1, "tutorial"): steps(40, 480, 800, 6.0),
        (0, "peak"): pd.Series({"flops": 1e6}),
        (1, "peak"): pd.Series({"flops": 2e6}),
    }
    frame = pd.DataFrame(measured).T.rename_axis(["round", "job"])
    page = Page("Speed", {}, tmp_path)
    page.section("model", "model")
    speed.show(page, frame, ["ddp_loop", "tutorial"], parameters=100)
    lines = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()]
    # 200 and 320 tokens/s, in reviews of 10 tokens; MFU 6 x 100 x 200 / 1e6 and 6 x 100 x 320 / 2e6.
    assert "|ddp_loop|26.0|1.000|1.000|1.000|20.0%|10.8%|" in lines
    assert "|tutorial|9.0|3.000|2.000|4.000|45.0%|4.2%|" in lines
    assert page.numbers["mfu"] == {"ddp_loop": [0.12, 0.096], "tutorial": [0.06, 0.024]}
