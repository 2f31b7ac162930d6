"""What clients send, to real servers: a request has one answer, whatever is around it.

`python -m tests.support.traffic COUNT [SEED]` serves a taught pair under chat templates of every
tool format, in both modes, by `dflash-trt serve`. A request is first answered alone, whole, by
plain decoding and with an empty cache. Then it is sent beside 31 others over every door that can
ask for it, whole and streamed, with drafts and without, with a warm cache and a cold one, and cut
by a client that leaves. All answers have to be the first one; what differs is printed as JSON, and
at the end how often each kind of request, way and answer occurred.

Nobody taught the pair to chat. What it answers is steered: by choices of which it takes one, calls
as the template writes them, whole or with marks lost, doubled and misplaced; and by a bias for the
tokens of marks, which makes a salad of them.
"""
