"""Every error a caller can meet, each with a stable code and an exit status.

    GeoDilocoError
    ├── UserError                  exit 2: something a person typed or wrote
    │   ├── ManifestError          GD-101  a run manifest that can't be used
    │   ├── InviteError            GD-102  an invite that can't be read
    │   ├── ConfigError            GD-103  a flag, path or environment value
    │   ├── DataError              GD-104  no usable training data
    │   ├── ModelError             GD-105  a model that can't be built or has no trainable parameters
    │   └── RunDirError            GD-106  a run directory that is missing, in use or damaged
    ├── DirectoryError             GD-201  the DHT can't be started or reached (exit 3)
    ├── RefusedError               GD-202  the run refused this peer, by name of the difference (exit 4)
    ├── RemoteProtocolError        GD-203  another peer broke the protocol (carries the peer)
    ├── LocalProtocolError         GD-204  we broke it: a bug of ours
    ├── TransferError              GD-205  a blob could not be moved
    ├── SlowError                  GD-206  a peer did not leave, or answer, in the time it has for that
    ├── FrameError                 GD-301  bytes that are not a valid codec frame
    │   ├── TruncatedFrame         GD-302  shorter than it declares
    │   ├── FrameLengthError       GD-303  a declared length disagrees with the layout or the bytes
    │   ├── NonFiniteFrame         GD-304  a scale or value that is NaN or infinite
    │   ├── OversizedFrame         GD-305  would decompress to more than the layout allows
    │   └── FrameLayoutError       GD-306  made for another fragment layout or codec
    ├── BlobError                  GD-401  bytes that don't match their digest, or aren't there
    ├── LayoutError                GD-402  two models whose fragments differ, by name of the first difference
    ├── DigestMismatch             GD-403  a state that should be bit-identical is not
    ├── TapeError                  GD-404  a tape that can't be read or that diverges
    └── SimulationError            GD-405  a simulated run broke an invariant

A message says what it was, what was wanted and what to do. Codes never change their meaning.
"""

from __future__ import annotations

from typing import ClassVar


class GeoDilocoError(Exception):
    """Base of every error raised on purpose."""

    code: ClassVar[str] = "GD-000"
    exit_status: ClassVar[int] = 1


class UserError(GeoDilocoError):
    """Something a person typed or wrote; reported in one line, exit status 2."""

    code = "GD-100"
    exit_status = 2


class ManifestError(UserError):
    """A run manifest that can't be used. Names the key, the value and what is allowed."""

    code = "GD-101"


class InviteError(UserError):
    """An invite string that can't be read."""

    code = "GD-102"


class ConfigError(UserError):
    """A flag, a path or an environment value that can't be used."""

    code = "GD-103"


class DataError(UserError):
    """Training data that is missing, empty or unreadable."""

    code = "GD-104"


class ModelError(UserError):
    """A model that can't be built."""

    code = "GD-105"


class RunDirError(UserError):
    """A run directory that is missing, in use by another process, or damaged."""

    code = "GD-106"


class DirectoryError(GeoDilocoError):
    """The DHT can't be started or reached."""

    code = "GD-201"
    exit_status = 3


class RefusedError(GeoDilocoError):
    """The run refused this peer; the message names the difference."""

    code = "GD-202"
    exit_status = 4


class RemoteProtocolError(GeoDilocoError):
    """Another peer sent something the protocol does not allow."""

    code = "GD-203"

    def __init__(self, message: str, *, peer: str = "unknown") -> None:
        super().__init__(f"peer {peer[:8]}: {message}")
        self.peer = peer


class LocalProtocolError(GeoDilocoError):
    """This peer broke the protocol: a bug of ours."""

    code = "GD-204"


class TransferError(GeoDilocoError):
    """A blob could not be moved; the transfer may be tried again and resumes."""

    code = "GD-205"


class SlowError(GeoDilocoError, TimeoutError):
    """A peer of ours did not leave, or answer, in the time it has for that: a disk or a machine that is very busy."""

    code = "GD-206"


class FrameError(GeoDilocoError):
    """Bytes that are not a valid codec frame."""

    code = "GD-301"


class TruncatedFrame(FrameError):
    """A frame shorter than it declares."""

    code = "GD-302"


class FrameLengthError(FrameError):
    """A declared length that disagrees with the layout or with the bytes that follow."""

    code = "GD-303"


class NonFiniteFrame(FrameError):
    """A frame with a scale or a value that is NaN or infinite."""

    code = "GD-304"


class OversizedFrame(FrameError):
    """A frame that would decompress to more bytes than its layout allows."""

    code = "GD-305"


class FrameLayoutError(FrameError):
    """A frame made for another layout, fragment or codec."""

    code = "GD-306"


class BlobError(GeoDilocoError):
    """Bytes that don't match their digest, or a blob that is not held."""

    code = "GD-401"


class LayoutError(GeoDilocoError):
    """Two fragment layouts that differ; the message names the first difference."""

    code = "GD-402"
    exit_status = 4


class DigestMismatch(GeoDilocoError):
    """A fragment whose bits are not those of the commit."""

    code = "GD-403"


class TapeError(GeoDilocoError):
    """A tape that can't be read, or whose replay diverges."""

    code = "GD-404"


class SimulationError(GeoDilocoError):
    """A simulated run broke an invariant, or came to something else than its scenario expects."""

    code = "GD-405"
