from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromWorker(_message.Message):
    __slots__ = ("hello", "ready", "rows", "alive", "failed", "leave", "payload")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    rows: Rows
    alive: Alive
    failed: Failed
    leave: Leave
    payload: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("welcome", "open", "act", "close", "goodbye", "payload")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    open: Open
    act: Act
    close: Close
    goodbye: Goodbye
    payload: bytes
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., act: _Optional[_Union[Act, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "run", "worker", "env", "lanes", "version")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run: int
    worker: str
    env: str
    lanes: int
    version: str
    def __init__(self, protocol: _Optional[int] = ..., run: _Optional[int] = ..., worker: _Optional[str] = ..., env: _Optional[str] = ..., lanes: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session", "options", "alive_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    options: str
    alive_ms: int
    def __init__(self, session: _Optional[int] = ..., options: _Optional[str] = ..., alive_ms: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("spec", "options")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    spec: Spec
    options: str
    def __init__(self, spec: _Optional[_Union[Spec, _Mapping]] = ..., options: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("block", "lanes", "seed", "evaluation")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    block: int
    lanes: int
    seed: int
    evaluation: bool
    def __init__(self, block: _Optional[int] = ..., lanes: _Optional[int] = ..., seed: _Optional[int] = ..., evaluation: bool = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("block",)
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    block: int
    def __init__(self, block: _Optional[int] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("block", "step", "env_us")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENV_US_FIELD_NUMBER: _ClassVar[int]
    block: int
    step: int
    env_us: int
    def __init__(self, block: _Optional[int] = ..., step: _Optional[int] = ..., env_us: _Optional[int] = ...) -> None: ...

class Act(_message.Message):
    __slots__ = ("block", "step")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    block: int
    step: int
    def __init__(self, block: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("block", "error")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    block: int
    error: str
    def __init__(self, block: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alive(_message.Message):
    __slots__ = ("block", "busy_ms")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    BUSY_MS_FIELD_NUMBER: _ClassVar[int]
    block: _containers.RepeatedScalarFieldContainer[int]
    busy_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block: _Optional[_Iterable[int]] = ..., busy_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("why", "text")
    class Why(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Goodbye.Why]
        FINISHED: _ClassVar[Goodbye.Why]
        RESTARTING: _ClassVar[Goodbye.Why]
        FAILED: _ClassVar[Goodbye.Why]
    UNSPECIFIED: Goodbye.Why
    FINISHED: Goodbye.Why
    RESTARTING: Goodbye.Why
    FAILED: Goodbye.Why
    WHY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    why: Goodbye.Why
    text: str
    def __init__(self, why: _Optional[_Union[Goodbye.Why, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Spec(_message.Message):
    __slots__ = ("name", "observation", "action", "max_episode_steps", "scalar_rows", "metrics")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    MAX_EPISODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    SCALAR_ROWS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    observation: Space
    action: Space
    max_episode_steps: int
    scalar_rows: int
    metrics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., observation: _Optional[_Union[Space, _Mapping]] = ..., action: _Optional[_Union[Space, _Mapping]] = ..., max_episode_steps: _Optional[int] = ..., scalar_rows: _Optional[int] = ..., metrics: _Optional[_Iterable[str]] = ...) -> None: ...

class Space(_message.Message):
    __slots__ = ("discrete", "multi", "box", "dict", "start")
    DISCRETE_FIELD_NUMBER: _ClassVar[int]
    MULTI_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    discrete: int
    multi: Heads
    box: Box
    dict: Named
    start: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, discrete: _Optional[int] = ..., multi: _Optional[_Union[Heads, _Mapping]] = ..., box: _Optional[_Union[Box, _Mapping]] = ..., dict: _Optional[_Union[Named, _Mapping]] = ..., start: _Optional[_Iterable[int]] = ...) -> None: ...

class Heads(_message.Message):
    __slots__ = ("n",)
    N_FIELD_NUMBER: _ClassVar[int]
    n: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, n: _Optional[_Iterable[int]] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("low", "high", "shape", "dtype")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Named(_message.Message):
    __slots__ = ("name", "space")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    name: _containers.RepeatedScalarFieldContainer[str]
    space: _containers.RepeatedCompositeFieldContainer[Space]
    def __init__(self, name: _Optional[_Iterable[str]] = ..., space: _Optional[_Iterable[_Union[Space, _Mapping]]] = ...) -> None: ...
