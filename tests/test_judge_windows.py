"""Dense windows, their stitching, and the medoid: worked by hand, and laws over any length."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from regrasp.rewards.medoid import find_medoid
from regrasp.rewards.windows import count_steps, plan_windows, stitch


def spans(duration_s: float) -> list[tuple[float, float]]:
    return [(round(w.start_s, 6), round(w.end_s, 6)) for w in plan_windows(duration_s)]


def test_windows_start_every_10_s_and_the_last_ends_with_the_episode():
    assert spans(0.5) == [(0, 0.5)]
    assert spans(16.0) == [(0, 16)]
    assert spans(20.0) == [(0, 16), (4, 20)]
    assert spans(26.0) == [(0, 16), (10, 26)]  # the second window is the last: none is added
    assert spans(30.0) == [(0, 16), (10, 26), (14, 30)]
    assert spans(37.3) == [(0, 16), (10, 26), (20, 36), (21.3, 37.3)]


def test_a_window_has_64_frames_a_quarter_of_a_second_apart():
    window = plan_windows(37.3)[1]
    assert window.steps == 32
    assert window.frame_times().tolist() == [10 + k / 4 for k in range(64)]  # 10.0 to 25.75 s
    short = plan_windows(1.3)[0]  # [0, 0.5), [0.5, 1), [1, 1.3)
    assert short.steps == 3
    assert short.frame_times().tolist() == [0, 0.25, 0.5, 0.75, 1.0, 1.25]


def test_the_last_4_s_of_a_window_are_the_next_windows():
    # 26 s: the first window keeps [0, 12), the second, as the last, all of [10, 26). In [10, 12) both have a step at
    # the very place; the middles of what is kept are 6 and 18, so that 12 is where the second takes over.
    owners = stitch(26.0, plan_windows(26.0))
    assert owners[:, 0].tolist() == [0] * 24 + [1] * 28
    assert owners[:24, 1].tolist() == list(range(24))
    assert owners[24:, 1].tolist() == list(range(4, 32))


def test_between_two_inner_windows_the_overlap_is_split_in_the_middle():
    # 46 s: kept are [0, 12), [10, 22), [20, 32) and [30, 46). The middles 6 and 16 meet at 11, 16 and 26 at 21, 26 and
    # 38 at 32.
    owners = stitch(46.0, plan_windows(46.0))[:, 0]
    assert [int((owners == window).sum()) for window in range(4)] == [22, 20, 22, 28]
    assert (np.diff(owners) >= 0).all()


def test_a_half_second_off_the_last_windows_grid_takes_the_nearest_step():
    # 16.2 s: windows [0, 16) and [0.2, 16.2). The first keeps [0, 12): its steps are exactly on the grid and win there.
    # Half second 24 is [12, 12.5) with its middle at 12.25. The last window's middles are 0.45 + k/2: 11.95 and 12.45;
    # 12.45 (k = 24) is nearer, by 0.2 against 0.3.
    owners = stitch(16.2, plan_windows(16.2)).tolist()
    assert owners[:24] == [[0, k] for k in range(24)]
    assert owners[24] == [1, 24]
    assert owners[32] == [1, 31]  # [16, 16.2): the last step


@settings(deadline=None, max_examples=60)
@given(st.floats(0.5, 3600.0))
def test_every_half_second_of_any_length_gets_exactly_one_score(duration_s: float):
    windows = plan_windows(duration_s)
    assert windows[0].start_s == 0
    assert abs(windows[-1].end_s - duration_s) < 1e-9
    owners = stitch(duration_s, windows)
    assert len(owners) == count_steps(duration_s)
    assert (len(owners) - 1) * 0.5 < duration_s <= len(owners) * 0.5 + 1e-6
    for half, (number, step) in enumerate(owners.tolist()):
        window = windows[number]
        assert 0 <= step < window.steps
        middle = window.start_s + (step + 0.5) * 0.5
        assert abs(middle - (half + 0.5) * 0.5) <= 0.5 + 1e-6
        assert number == len(windows) - 1 or middle < window.end_s - 4


@given(st.floats(16.5, 600.0))
def test_windows_leave_no_gap_once_their_tails_are_dropped(duration_s: float):
    windows = plan_windows(duration_s)
    for one, following in itertools.pairwise(windows):
        assert one.start_s < following.start_s <= one.end_s - 4


def test_the_medoid_is_the_sample_nearest_to_all_others():
    # L1 distances: 0-1 0.5, 0-2 1.0, 1-2 0.5. Sums: 1.5, 1.0, 1.5. Its spread is 1.0 over two others.
    found = find_medoid([[0.0, 0.0], [0.5, 0.0], [0.5, 0.5]])
    assert (found.index, found.spread) == (1, 0.5)


def test_of_equally_good_samples_the_first_is_the_medoid():
    assert find_medoid([[0.2], [0.4]]).index == 0
    assert find_medoid([[0.3], [0.1 + 0.2], [0.3]]).index == 0  # rounding makes no difference
    assert find_medoid([[0.7]]).spread == 0.0


@given(st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5]), min_size=3, max_size=3), min_size=1, max_size=9))
def test_no_sample_is_nearer_to_the_others_than_the_medoid(samples: list[list[float]]):
    def cost(one: list[float]) -> float:
        return sum(abs(a - b) for other in samples for a, b in zip(one, other, strict=True))

    found = find_medoid(samples)
    assert cost(samples[found.index]) <= min(map(cost, samples)) + 1e-9
