"""What a job will take, before it runs: from a step of the code that trains, on no data.

`trace_step` runs the trainer's own step as any rank of any world, without data and messages, and
records each operator, each message and the most memory at a time.
"""

from tonari.oracle.record import Event, Message, Operator, Recorder
from tonari.oracle.trace import Trace, trace_step
from tonari.oracle.traffic import Traffic, traffic

__all__ = ["Event", "Message", "Operator", "Recorder", "Trace", "Traffic", "trace_step", "traffic"]
