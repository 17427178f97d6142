"""A workflow of DBOS: ask for the price, charge it. `start` begins it; launching is what goes on with it."""

import sys

import bank
from dbos import DBOS, SetWorkflowID


@DBOS.step()
def quote() -> str:
    return bank.quote()


@DBOS.step()
def charge(price: str) -> str:
    return bank.charge(price)


@DBOS.workflow()
def order() -> str:
    return charge(quote())


if __name__ == "__main__":
    DBOS(config={"name": "orders", "system_database_url": "sqlite:///runs.db", "application_version": "1"})
    DBOS.launch()
    if sys.argv[1] == "start":
        with SetWorkflowID("order-7"):
            print(order())
    else:
        print(DBOS.retrieve_workflow("order-7").get_result())
