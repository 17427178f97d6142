"""A workflow of Temporal: ask for the price, charge it. `start` begins it and works it, anything else works it.

`TEMPORAL` names the server (host:port).
"""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    import bank


@activity.defn
def quote() -> str:
    return bank.quote()


@activity.defn
def charge(price: str) -> str:
    return bank.charge(price)


@workflow.defn
class Order:
    @workflow.run
    async def run(self) -> str:
        limit = timedelta(seconds=5)
        price = await workflow.execute_activity(quote, start_to_close_timeout=limit)
        return await workflow.execute_activity(charge, price, start_to_close_timeout=limit)


async def main() -> None:
    client = await Client.connect(os.environ["TEMPORAL"])
    with ThreadPoolExecutor() as threads:
        async with Worker(
            client, task_queue="orders", workflows=[Order], activities=[quote, charge], activity_executor=threads
        ):
            if sys.argv[1] == "start":
                await client.start_workflow(Order.run, id="order-7", task_queue="orders")
            print(await client.get_workflow_handle("order-7").result())


if __name__ == "__main__":
    asyncio.run(main())
