"""What `make demo` claims, on the model that the package carries."""

from __future__ import annotations

from colibri.ctl.demo import default_model, run_demo


def test_the_demo_goes_on_after_kill_9_with_the_tokens_of_an_undisturbed_daemon() -> None:
    lines: list[str] = []
    figures = run_demo(default_model(), lines.append)
    assert figures.same_replies
    # Everything but the last token drawn, which no KV cache holds, was on disk before the kill.
    assert figures.cached_tokens == figures.tokens_before_kill - 1
    assert figures.prefilled_tokens < 32
    assert any("kill -9" in line for line in lines)
