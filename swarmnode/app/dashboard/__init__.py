"""The coordinator: one live page that shows a whole run. It only watches; training does not depend on it.

The coordinator has two sources. (1) *Records*: it is a member of the run's DHT and looks up every stage each announce
period. Records give each node's stage, speed, queue length, round and version. (2) *Reports*: it calls each node
("report" in call.proto, over the same libp2p streams and NAT traversal as all other calls), at most REPORTS_PER_S in
all. A report gives the node's status, its counters, its busiest links and its latest events. The node keeps a ring of
events and answers from memory. Too frequent calls get `Busy`. The coordinator pulls because then nodes need to know no
coordinator, any number of coordinators may watch, and one constant bounds the load. A report is its node's own claim
and is shown as such. Nodes sign their records, and the clients that a node worked for sign the receipts in its report
(ledger.py).

    records, reports ──► collect ──► board ──► live ──► history (SQLite)
                                       │         └────► server ──► page (server-sent events)
                                       └─► view, alarm, timeline, tally: pure
"""
