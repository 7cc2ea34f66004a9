"""Why was this skipped, who won, what did it save: decision rows, and the auditor that checks them."""

from __future__ import annotations

from ragfence.audit.auditor import Finding, Report, check

__all__ = ["Finding", "Report", "check"]
