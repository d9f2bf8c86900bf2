"""The coordinator: one page on which a whole run can be seen, live. It watches; nobody who trains needs it.

How facts come here. (1) *Records*: the coordinator is a member of the run's DHT and looks every stage up each announce
period: who is there, on which stage, how fast, how long a queue, which round and version. (2) *Reports*: it calls each
node ("report" in call.proto, over the same libp2p streams as everything else, through NATs as they do), at most
REPORTS_PER_S in all, and gets the node's status, its counters, its busiest links and its latest events. The node keeps
a ring of events and answers from memory; who asks too often gets `Busy`. Pulling was chosen over pushing because a
node then needs to know no coordinator, any number of them may watch, and the load has one bound in one place. What a
report says is its node's own claim and is shown as such; records are signed by their node, and the receipts in a report
by those the node worked for (ledger.py).

    records, reports ──► collect ──► board ──► live ──► history (SQLite)
                                       │         └────► server ──► page (server-sent events)
                                       └─► view, alarm, timeline, tally: pure
"""
