"""The speed benchmark: its table from known steps of jobs."""

from __future__ import annotations

import pandas as pd

from app.bench import speed
from app.bench.core import Page


def test_speed_padding_mfu_and_ratios_of_known_steps(tmp_path, capsys):
    # The mean length is 10 tokens. In the second round, the tutorial's reviews are longer than on average.
    measured = {
        (0, "ddp_loop"): {"examples": 40, "tokens": 400, "padded_tokens": 500, "seconds": 2.0},
        (0, "tutorial"): {"examples": 40, "tokens": 400, "padded_tokens": 800, "seconds": 4.0},
        (1, "ddp_loop"): {"examples": 40, "tokens": 320, "padded_tokens": 400, "seconds": 1.0},
        (1, "tutorial"): {"examples": 40, "tokens": 480, "padded_tokens": 800, "seconds": 6.0},
        (0, "peak"): {"flops": 1e6},
        (1, "peak"): {"flops": 2e6},
    }
    frame = pd.DataFrame.from_dict(measured, orient="index", dtype=float).rename_axis(["round", "job"])
    page = Page("Speed", {}, tmp_path)
    page.section("model", "model")
    speed.show(page, frame, ["ddp_loop", "tutorial"], parameters=100)
    lines = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()]
    # 200 and 320 tokens/s, in reviews of 10 tokens; MFU 6 x 100 x 200 / 1e6 and 6 x 100 x 320 / 2e6.
    assert "|ddp_loop|26.0|1.000|1.000|1.000|20.0%|10.8%|" in lines
    assert "|tutorial|9.0|3.000|2.000|4.000|45.0%|4.2%|" in lines
    assert page.numbers["mfu"] == {"ddp_loop": [0.12, 0.096], "tutorial": [0.06, 0.024]}
