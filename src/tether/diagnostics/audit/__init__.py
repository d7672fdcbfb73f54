"""The audit of saved rollouts: has this run, made in any framework, come loose from its input?

    collected = collect(open_rollouts("rollouts.jsonl"), AuditOptions())
    found = audit(collected, load_judge("smollm2"), AuditOptions())
    found.verdict.headline

Two readings of the files, both in bounded memory: the first counts (`survey`), the second draws a seeded sample of the windows that are worth
measuring (`windows`, `sample`). The sample becomes token ids (`encode`), is scored and measured window by window (`measure`, `wording`), judged
(`verdict`), and followed over the steps (`course`). `document` is all of it as plain JSON, which the report is made from.
"""

from tether.diagnostics.audit.conduct import Audit, AuditOptions, Collected, WindowAudit, audit, collect
from tether.diagnostics.audit.document import to_document
from tether.diagnostics.audit.scoring import Judge, load_judge, resolve_model
from tether.diagnostics.audit.verdict import Verdict, VerdictCode

__all__ = [
    "Audit", "AuditOptions", "Collected", "Judge", "Verdict", "VerdictCode", "WindowAudit",
    "audit", "collect", "load_judge", "resolve_model", "to_document",
]  # fmt: skip
