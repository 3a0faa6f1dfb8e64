"""stage_arrays on NumPy, and the packing of its buffer cut anywhere."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import stager
from stager.batches.arrays import _Packed
from stager.cuda import upload
from stager.errors import ClosedError, ConfigError

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]

one_array = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
some_arrays = st.one_of(
    st.lists(one_array, max_size=12),
    # One shape and dtype: the path that keeps nothing per array.
    st.tuples(st.sampled_from(DTYPES), arrays_of.array_shapes(max_dims=3, max_side=4), st.integers(0, 9)).map(
        lambda t: [(np.arange(np.prod(t[1])) + k).astype(t[0]).reshape(t[1]) for k in range(t[2])]
    ),
)


def staged(arrays, **options):
    return stager.stage_arrays(arrays, device="cpu", **options)


def assert_same(views, arrays):
    assert len(views) == len(arrays)
    for view, array in zip(views, arrays, strict=True):
        assert view.dtype == array.dtype
        assert view.shape == array.shape
        assert view.flags.c_contiguous
        np.testing.assert_array_equal(view, array)


@settings(max_examples=150, deadline=None)
@given(arrays=some_arrays, align=st.sampled_from([8, 16, 32, 64, 128, 256]))
def test_any_arrays_come_back(arrays, align):
    with staged(arrays, align=align) as views:
        assert_same(views, arrays)
        for k in range(len(views)):
            assert views[k].ctypes.data % align == 0 or views[k].nbytes == 0
            assert not views[k].flags.writeable
        assert views.nbytes % align == 0
        assert views.nbytes == sum(-(-array.nbytes // align) * align for array in arrays)


@settings(max_examples=200, deadline=None)
@given(arrays=some_arrays, align=st.sampled_from([8, 16, 64]), cuts=st.lists(st.integers(0, 2000), max_size=6))
def test_the_buffer_is_the_same_however_it_is_cut(arrays, align, cuts):
    packed = _Packed(arrays, align)
    right = b"".join(array.tobytes() + bytes(-array.nbytes % align) for array in arrays)
    assert packed.nbytes == len(right)
    edges = sorted({0, packed.nbytes, *(cut for cut in cuts if cut < packed.nbytes)})
    for first, stop in itertools.pairwise(edges):
        out = np.full(stop - first, 0xA5, np.uint8)
        packed.fill(out, first)
        assert out.tobytes() == right[first:stop]


@settings(max_examples=150, deadline=None)
@given(arrays=some_arrays, most=st.integers(1, 300))
def test_spans_tile_the_buffer(arrays, most):
    packed = _Packed(arrays, 8)
    spans = packed.spans(most)
    assert [first for first, _ in spans] == ([0] + [stop for _, stop in spans])[: len(spans)]
    assert (spans[-1][1] if spans else 0) == packed.nbytes
    assert all(0 < stop - first <= most for first, stop in spans)


@pytest.mark.parametrize("ring", [64, 100, 4096])
def test_arrays_larger_than_the_ring_are_filled_in_parts(monkeypatch, ring):
    monkeypatch.setattr(upload, "RING_NBYTES", ring)
    arrays = [np.arange(k, k + 240, dtype=np.int16).reshape(60, 4) for k in range(9)]
    packed = _Packed(arrays, 16)
    whole = np.zeros(packed.nbytes, np.uint8)
    for first, stop in packed.spans(upload.RING_NBYTES):
        packed.fill(whole[first:stop], first)
    assert whole.tobytes() == b"".join(array.tobytes() for array in arrays)


def test_nothing_and_empty_arrays():
    with staged([]) as views:
        assert len(views) == 0
        assert list(views) == []
        assert views.nbytes == 0
        with pytest.raises(IndexError):
            views[0]
    empty = [np.empty((0, 5), np.float32), np.empty(0, np.int8), np.empty((3, 0, 2))]
    with staged(empty) as views:
        assert_same(views, empty)
    mixed = [*empty, np.full((), 3, np.float32), np.arange(3), *empty]
    with staged(mixed) as views:
        assert_same(views, mixed)


def test_any_strides_are_copied_in_c_order():
    base = np.arange(2 * 60 * 5, dtype=np.float32).reshape(2, 60, 5)
    arrays = [
        base[0],
        np.asfortranarray(base[0]),
        base[0, ::3, ::2],
        base[1, ::-1, ::-2],
        base.transpose(2, 0, 1),
        np.broadcast_to(base[0, 0], (4, 5)),
        base[0],
        base[0],
    ]
    with staged(arrays) as views:
        assert_same(views, arrays)
    # All of one shape: the fast path.
    alike = [base[0], np.asfortranarray(base[1]), base[0, ::-1], base[0]] * 3
    with staged(alike) as views:
        assert_same(views, alike)


def test_what_is_staged_is_a_copy():
    arrays = [np.zeros(8), np.zeros(8)]
    with staged(arrays) as views:
        arrays[0][:] = 7
        assert not views[0].any()


def test_generators_and_subclasses(tmp_path):
    with staged(np.full(4, k) for k in range(5)) as views:
        assert [int(view[0]) for view in views] == [0, 1, 2, 3, 4]
    mapped = np.memmap(tmp_path / "a.bin", np.float64, "w+", shape=(4, 2))
    mapped[:] = 3
    with staged([mapped, np.ones((4, 2)), mapped.view(np.recarray).view(np.ndarray)]) as views:
        assert_same(views, [mapped, np.ones((4, 2)), mapped])
        assert type(views[0]) is np.ndarray
    with staged(np.arange(6.0).reshape(3, 2)) as views:
        assert_same(views, [np.array([0.0, 1.0]), np.array([2.0, 3.0]), np.array([4.0, 5.0])])


def test_it_is_a_sequence():
    arrays = [np.full(3, k) for k in range(7)]
    with staged(arrays) as views:
        assert_same(views[:], arrays)
        assert_same(views[1:6:2], arrays[1:6:2])
        assert_same(views[::-1], arrays[::-1])
        assert views[5:2] == []
        np.testing.assert_array_equal(views[-1], arrays[-1])
        np.testing.assert_array_equal(views[np.int64(2)], arrays[2])
        for index in (7, -8, 10**12):
            with pytest.raises(IndexError, match=rf"no array {index}"):
                views[index]
        for index in (1.0, "1", None):
            with pytest.raises(TypeError):
                views[index]
        assert "7 arrays" in repr(views)
        with pytest.raises(TypeError):
            views[0] = 3


def test_after_release_it_is_refused_and_views_stay_right():
    arrays = [np.full(5, k, np.float32) for k in range(4)]
    views = staged(arrays)
    kept = [views[1], views[3][1:], views[0][:0]]
    with pytest.warns(ResourceWarning, match="3 views of the released arrays"):
        views.release()
    np.testing.assert_array_equal(kept[0], arrays[1])
    np.testing.assert_array_equal(kept[1], arrays[3][1:])
    views.release()
    for use in (lambda: views[0], lambda: views[:], lambda: list(views)):
        with pytest.raises(ClosedError, match="released"):
            use()
    assert len(views) == 4
    assert "released" in repr(views)


@pytest.mark.parametrize("uniform", [True, False])
def test_release_without_views_is_silent(uniform):
    arrays = [np.ones(16 if uniform else k) for k in range(1, 5)]
    views = staged(arrays)
    assert_same(views, arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        views.release()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (np.array([None, {}]), "dtype object"),
        (np.ones(3, ">f4"), "dtype >f4"),
        (np.ones(3, np.longdouble), "dtype <f16"),
        (np.ones(3, np.complex64), "dtype complex64"),
        (np.array(["a", "b"]), "dtype <U1"),
        (np.array(["2024-01-01"], "M8[ns]"), "dtype datetime64"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        ([1.0, 2.0], "a list"),
        (3.0, "a float"),
        (np.float32(3), "a float32"),
        (None, "a NoneType"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "a MaskedArray"),
    ],
)
def test_what_cannot_be_staged_is_refused_by_its_index(wrong, text):
    with pytest.raises(ConfigError, match="array 2 ") as caught:
        staged([np.ones(2), np.ones(3), wrong, np.ones(2)])
    assert text in str(caught.value)


@pytest.mark.parametrize("align", [0, 4, 12, -16, 512, 16.0, True, "16", None])
def test_a_wrong_align_is_refused(align):
    with pytest.raises(ConfigError, match="align"):
        staged([np.ones(3)], align=align)


def test_a_wrong_device_is_refused():
    with pytest.raises(ConfigError, match="tpu"):
        stager.stage_arrays([np.ones(3)], device="tpu")


def test_106_652_arrays_are_all_right():
    block = np.random.default_rng(0).random((106_652, 60, 5), np.float32)
    with staged(list(block)) as views:
        assert len(views) == 106_652
        assert views.nbytes == block.nbytes
        assert all(np.array_equal(view, array) for view, array in zip(views, block, strict=True))
