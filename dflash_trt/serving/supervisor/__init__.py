"""The processes of `dflash-trt serve`."""

from dflash_trt.serving.http.rooted import read_root_path
from dflash_trt.serving.ports import LOOPBACK, Ports, free_ports
from dflash_trt.serving.security import read_security
from dflash_trt.serving.supervisor.launch import find_binary
from dflash_trt.serving.supervisor.run import Options, running_server, serve
from dflash_trt.serving.supervisor.update_drafter import update_drafter
