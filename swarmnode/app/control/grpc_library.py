"""gRPC, silent: the one place that imports it, so that a process says nothing but our own lines on stderr.

Only a function that serves or watches imports this module. A process that forks (app/local/fork_server.py) must not
hold gRPC's threads, and a verb that asks once does without its 50 ms (measured with -X importtime).
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # of its core; whoever looks for a fault sets it
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # what a daemon starts, it starts by exec

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from swarmnode.base.wire import control_pb2_grpc

__all__ = ["control_pb2_grpc", "grpc", "health_pb2", "health_pb2_grpc", "reflection"]
