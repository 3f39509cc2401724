"""Numbers read the same everywhere."""

from __future__ import annotations

from hetero_framework import units


def test_size_has_three_digits_and_a_binary_unit():
    shown = [units.size(n) for n in (0, 999, 1023, 1536, 5 << 20, 999 << 20, 1000 << 20, 3 << 40)]
    assert shown == [
        "0 B", "999 B", "1.00 KiB", "1.50 KiB", "5.00 MiB", "999 MiB", "0.98 GiB", "3.00 TiB",
    ]  # fmt: skip


def test_large_counts_are_abbreviated():
    shown = [units.count(n) for n in (7, 999, 1500, 2_000_000, 12_600_000, 8.03e9)]
    assert shown == ["7", "999", "1.50 K", "2.00 M", "12.6 M", "8.03 B"]


def test_plural_follows_the_noun():
    assert units.plural(1, "process") == "1 process"
    assert units.plural(2, "process") == "2 processes"
    assert units.plural(4, "micro-batch") == "4 micro-batches"
    assert units.plural(1200, "layer") == "1,200 layers"


def test_seconds_are_milliseconds_below_one():
    times = (0, 0.00002, 0.0206, 0.1234, 0.9996, 1.235, 12.35, 1234)
    assert [units.seconds(t) for t in times] == [
        "0.00 ms", "0.02 ms", "20.6 ms", "123 ms", "1.00 s", "1.24 s", "12.3 s", "1,234 s",
    ]  # fmt: skip


def test_clock_is_rounded_to_seconds():
    assert [units.clock(s) for s in (0, 59.6, 3600, 360_000)] == [
        "0:00:00",
        "0:01:00",
        "1:00:00",
        "100:00:00",
    ]


def test_share_and_rate():
    assert units.share(0.358) == "36%"
    assert units.share(-1e-15) == "0%"
    assert units.bit_rate(125e6) == "1.00 Gbit/s"
    assert units.bit_rate(1.25e6) == "10.0 Mbit/s"
