"""The answers to one request, and their usage."""

import time

from ..engine.job import Job, Reason
from ..engine.loop import EngineThread
from .answer import Answer, Times


class Answers:
    """Answers to one request, possibly unfinished."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.jobs: list[Job] = []

    def add(self, answer: Answer, job: Job) -> None:
        self.answers.append(answer)
        self.jobs.append(job)

    def submit(self, generator: EngineThread) -> None:
        """Submits their jobs."""
        for answer, job in zip(self.answers, self.jobs, strict=True):
            answer.times = Times()
            generator.submit(job)

    def cancel(self) -> None:
        for job in self.jobs:
            job.cancel()

    @property
    def error(self) -> Exception | None:
        return next((a.reason for a in self.answers if isinstance(a.reason, Exception)), None)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens; each prompt counts once, however many answers it has."""
        return sum(answer.prompt_tokens for answer, _ in self._firsts)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache, for each prompt's first answer."""
        return sum(job.usage.cached_tokens for _, job in self._firsts)

    @property
    def disk_tokens(self) -> int:
        """Cached tokens that were read from the disk."""
        return sum(job.usage.disk_tokens for _, job in self._firsts)

    @property
    def _firsts(self) -> list[tuple[Answer, Job]]:
        """(first answer to each prompt, its job)."""
        pairs = reversed([*zip(self.answers, self.jobs, strict=True)])
        return [*{id(job.inputs): (answer, job) for answer, job in pairs}.values()]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def draft_tokens(self) -> tuple[int, int]:
        """(accepted, rejected) draft tokens."""
        each = [job.usage for job in self.jobs]
        return sum(usage.accepted_tokens for usage in each), sum(usage.rejected_tokens for usage in each)

    @property
    def drafts_form(self) -> dict[str, int]:
        """Draft token counts under OpenAI's names, for `usage`."""
        names = "accepted_prediction_tokens", "rejected_prediction_tokens"
        return dict(zip(names, self.draft_tokens, strict=True))

    @property
    def reasoning_tokens(self) -> int:
        return sum(answer.reasoning_tokens for answer in self.answers)

    def __str__(self) -> str:
        """Log line of the request."""
        now = time.monotonic()  # where the client leaves before the end
        first = min(a.times.first or a.times.ended or now for a in self.answers)
        submitted = min(answer.times.submitted for answer in self.answers)
        unread = submitted if self.tokens else first  # where nothing told that a prompt is read
        begun = min((a.times.begun for a in self.answers if a.times.begun is not None), default=unread)
        ended = max(a.times.ended or now for a in self.answers)
        tokens, seconds = self.tokens, ended - first
        speed = f" ({(tokens - 1) / seconds:.1f} tokens/s)" if tokens > 1 and seconds > 0 else ""
        disk = f", {self.disk_tokens} of the disk" if self.disk_tokens else ""
        accepted, rejected = self.draft_tokens
        drafted = (
            f", {accepted} of {accepted + rejected} draft tokens accepted" if accepted + rejected else ""
        )
        reasons = {_in_words(answer.reason) for answer in self.answers}
        return (
            f"waited {begun - submitted:.2f} s, "
            f"prompt {self.prompt_tokens} tokens ({self.cached_tokens} cached{disk}) "
            f"in {first - begun:.2f} s, "
            f"answer {tokens} tokens in {seconds:.2f} s{speed}{drafted}, {', '.join(sorted(reasons))}"
        )


def _in_words(reason: Reason | Exception | None) -> str:
    if reason is None:
        return "the client left"
    return reason if isinstance(reason, str) else "error"
