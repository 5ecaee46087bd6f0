from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Up(_message.Message):
    __slots__ = ("gradient", "leave", "values")
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    gradient: Gradient
    leave: Leave
    values: bytes
    def __init__(self, gradient: _Optional[_Union[Gradient, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., values: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("sum", "values")
    SUM_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    sum: Sum
    values: bytes
    def __init__(self, sum: _Optional[_Union[Sum, _Mapping]] = ..., values: _Optional[bytes] = ...) -> None: ...

class Sum(_message.Message):
    __slots__ = ("group", "index")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    group: str
    index: int
    def __init__(self, group: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...
