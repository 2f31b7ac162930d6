"""OpenAI's `/v1/responses` as a chat: its request, its answer as typed events, and kept answers."""

from dflash_trt.serving.http.responses.request import ReadRequest, ResponseRequest, read_request
from dflash_trt.serving.http.responses.store import Conversation, ResponseStore
from dflash_trt.serving.http.responses.tools import names_of
from dflash_trt.serving.http.responses.writer import ResponseWriter
