"""/metrics: the driver's counts as Prometheus reads them, named as vLLM names what means the same."""

from __future__ import annotations

from .driver import ServerCounts


def prometheus(counts: ServerCounts, model: str) -> str:
    """The text of /metrics."""
    label = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines: list[str] = []

    def say(name: str, kind: str, about: str, values: dict[str, float]) -> None:
        lines.append(f"# HELP detdiff:{name} {about}")
        lines.append(f"# TYPE detdiff:{name} {kind}")
        lines.extend(
            f'detdiff:{name}{{model_name="{label}"{more}}} {value}' for more, value in values.items()
        )

    say("num_requests_running", "gauge", "Requests with rows in the next forward.", {"": counts.running})
    say("num_requests_waiting", "gauge", "Requests without rows yet.", {"": max(0, counts.waiting)})
    say("prompt_tokens_total", "counter", "Tokens of prompts begun.", {"": counts.prompt_tokens})
    say("prefix_cache_hits_total", "counter", "Of those, from a cache.", {"": counts.cached_tokens})
    say("generation_tokens_total", "counter", "Tokens generated.", {"": counts.generated_tokens})
    ended = {f',finished_reason="{reason}"': count for reason, count in sorted(counts.ended.items())}
    say("request_success_total", "counter", "Requests ended, by reason.", dict(ended))
    say("forwards_total", "counter", "Forwards of the model.", {"": counts.forwards})
    refused = {f',status="{status}"': count for status, count in sorted(counts.refused.items())}
    say("requests_refused_total", "counter", "Requests refused, by HTTP status.", dict(refused))
    return "\n".join(lines) + "\n"
