"""Three hundred people who talk all the time, from outside the cluster, while a suite does things to it.

LiveLoad (driver.py) ── pipes ──▸ worker.py × n ── plato.client × 300/n ──▸ ipconfig, gateways
      │                              └─▸ history-<n>.jsonl: sent, accepted, settled, shown, online, offline
      └─▸ report.py: the histories, the database's rows and the clients' stores go to the checker; figures per mark
"""
