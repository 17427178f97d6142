"""The outside world of the programs beside this file: a bank that remembers each charge it was asked for, in a file.

`DIE=1` ends the process when the bank has acted and nothing is written down yet; `SLOW=1` lets the bank take two seconds.
"""

import os
import time

BANK = os.environ.get("BANK", "bank.txt")


def quote() -> str:
    return "price 20"


def charge(price: str, key: str = "-") -> str:
    with open(BANK, "a", encoding="utf-8") as bank:
        bank.write(f"{price} {key}\n")
    if os.environ.get("DIE"):
        os._exit(1)
    if os.environ.get("SLOW"):
        time.sleep(2)
    return "charged"
