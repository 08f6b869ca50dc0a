"""The comparison of observers runs, and what it says of the best range holds."""

import json

from benchmarks import observers


def test_quick_run_reports_every_observer_and_finds_no_range_better_than_the_best(tmp_path, capsys):
    results = observers.main(["--quick", "--out", str(tmp_path)])
    assert {r.reader for r in results} == set(observers.READERS)
    assert {r.sample for r in results} > set(observers.SHAPES)
    assert all(r.ratio >= 1 for r in results)
    mse = sorted(r.ratio for r in results if r.reader == "MSEObserver")
    assert mse[len(mse) // 2] < 1.02
    assert len(json.loads((tmp_path / "observers.json").read_text())) == len(results)
    assert (tmp_path / "observers.png").read_bytes().startswith(b"\x89PNG")
    assert "Student t" in capsys.readouterr().out
