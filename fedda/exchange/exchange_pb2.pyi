from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Up(_message.Message):
    __slots__ = ("hello", "gradient", "leave", "values")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    gradient: Gradient
    leave: Leave
    values: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., gradient: _Optional[_Union[Gradient, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., values: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: _containers.RepeatedCompositeFieldContainer[Position]
    def __init__(self, received: _Optional[_Iterable[_Union[Position, _Mapping]]] = ...) -> None: ...

class Gradient(_message.Message):
    __slots__ = ("group", "index", "examples")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    group: str
    index: int
    examples: int
    def __init__(self, group: _Optional[str] = ..., index: _Optional[int] = ..., examples: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Down(_message.Message):
    __slots__ = ("welcome", "sum", "ended", "values")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    sum: Sum
    ended: Ended
    values: bytes
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., sum: _Optional[_Union[Sum, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., values: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("taken", "rejoin")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    REJOIN_FIELD_NUMBER: _ClassVar[int]
    taken: _containers.RepeatedCompositeFieldContainer[Position]
    rejoin: float
    def __init__(self, taken: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., rejoin: _Optional[float] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("group", "count")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    group: str
    count: int
    def __init__(self, group: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Sum(_message.Message):
    __slots__ = ("group", "index")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    group: str
    index: int
    def __init__(self, group: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("reason", "again")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    again: bool
    def __init__(self, reason: _Optional[str] = ..., again: _Optional[bool] = ...) -> None: ...
