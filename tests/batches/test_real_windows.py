"""An epoch of windows over real files is what NumPy cuts from the files themselves."""

from __future__ import annotations

import numpy as np
import pytest
from real_windows import COLUMNS, FILES, FOLDER, Windows

import stager
from stager import ReadOptions, Stager, Target

pytestmark = pytest.mark.skipif(FOLDER is None, reason="STAGER_REAL_DATA is not set")


@pytest.mark.parametrize("window", [1, 30])
@pytest.mark.parametrize("name", FILES)
def test_an_epoch_over_a_real_file(name, window, tmp_path):
    windows = Windows(name, window)
    pack = stager.pack(windows.path, tmp_path / "real.pack", read=ReadOptions(**windows.options))
    columns = [pack.columns.index(column) for column in COLUMNS]
    target = Target(horizon=1, delay=0)
    with Stager(pack, window=window, target=target, batch_size=100, seed=5, device="cpu") as st:
        assert st.n_samples == len(windows.x) > 1000
        seen = np.zeros(st.n_samples, int)
        for batch in st.batches(1):
            ids = batch.sample_ids
            seen[ids] += 1
            np.testing.assert_array_equal(batch.x[:, :, columns], windows.x[ids])
            np.testing.assert_array_equal(batch.y, windows.y[ids])
            np.testing.assert_array_equal(batch.times, windows.times[ids])
        assert (seen == 1).all()
