"""Why was this skipped, who won, what did it save: decision rows, and the auditor that checks them."""

from __future__ import annotations

from ragfence.audit.auditor import AuditFinding, AuditReport, check

__all__ = ["AuditFinding", "AuditReport", "check"]
