from __future__ import annotations

from hetero_framework.cluster import oom_killer


def test_the_kernel_is_asked_why(tmp_path, monkeypatch):
    counters, messages = tmp_path / "vmstat", tmp_path / "kmsg"
    monkeypatch.setattr(oom_killer, "_COUNTERS", counters)
    monkeypatch.setattr(oom_killer, "_MESSAGES", messages)
    assert oom_killer.out_of_memory_kills() is None
    assert oom_killer.on_kill(7, None) == "out of memory, as a rule"
    counters.write_text("pgfault 1\noom_kill 3\n")
    assert oom_killer.out_of_memory_kills() == 3
    assert "reports no such kill" in oom_killer.on_kill(7, 3)
    assert "has killed a process for that" in oom_killer.on_kill(7, 2)
    messages.write_text("3,1,1,-;Out of memory: Killed process 7 (python) total-vm:9kB\n rest\n")
    text = "out of memory; the kernel: Out of memory: Killed process 7 (python) total-vm:9kB"
    assert oom_killer.on_kill(7, 3) == text
    assert "reports no such kill" in oom_killer.on_kill(77, 3)
