"""The exceptions kvquant raises for its users.

KVQuantError
├── PolicyError       a policy, or one of its settings, is not valid or does not fit the model
├── BudgetError       no policy meets a budget of bytes, or of loss; says what can be met
├── CodecError        a codec was given what it cannot encode or decode
├── FormatError       bytes that are not a kvquant block, or not the block that was asked for
├── UnsupportedError  a model, device or operation kvquant cannot serve; says what would serve
├── CacheStateError   a call that does not fit what the cache holds
└── StoreError        a store that cannot be opened, or not be used as asked
    └── StoreFullError    no tier has room, and nothing more may leave

KVQuantWarning      something works, but not as well as its user would expect

Every message is one line: what was given, what is allowed, and where.
"""

from __future__ import annotations

import reprlib

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxdict, _shown.maxlist, _shown.maxstring, _shown.maxother = 2, 3, 3, 80, 80


def shown(given: object) -> str:
    """``repr`` of what a user gave, never longer than a line can take."""
    try:
        return " ".join(_shown.repr(given).split("\n"))
    except ValueError:  # an integer of thousands of digits
        return f"<{type(given).__name__}>"


class KVQuantError(Exception):
    """Base of every error kvquant raises on purpose."""


class PolicyError(KVQuantError, ValueError):
    """A precision policy is invalid or does not fit the model."""


class BudgetError(KVQuantError, ValueError):
    """No policy meets the budget that was asked for."""


class CodecError(KVQuantError, ValueError):
    """A codec was asked for, or given, something it cannot handle."""


class FormatError(KVQuantError, ValueError):
    """Bytes are damaged, truncated, of another version, or another block's."""


class UnsupportedError(KVQuantError, NotImplementedError):
    """The model, device or operation cannot be served."""


class CacheStateError(KVQuantError, RuntimeError):
    """The call does not fit what the cache holds."""


class StoreError(KVQuantError, RuntimeError):
    """A store cannot be opened, or cannot be used as asked."""


class StoreFullError(StoreError):
    """No tier has room, and nothing more may leave."""


class KVQuantWarning(UserWarning):
    """Something works, but not as well as its user would expect."""
