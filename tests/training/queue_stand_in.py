"""A queue in memory under VERL's own replay buffer, for tests where its queue (the package TransferQueue) is missing."""

import sys
import types
from pathlib import Path


class Queue(types.ModuleType):
    """The calls of the module transfer_queue that VERL's buffer makes: trajectories and prompts by partition and key."""

    class KVBatchMeta:
        def __init__(self, partition_id, keys, tags):
            self.partition_id, self.keys, self.tags = partition_id, keys, tags

    def __init__(self):
        super().__init__("transfer_queue")
        self.tags, self.fields = {}, {}

    def put(self, partition, key, tag, fields=None):
        self.tags.setdefault(partition, {})[key] = tag
        self.fields[partition, key] = fields

    def kv_list(self):
        return {partition: dict(tags) for partition, tags in self.tags.items()}

    def kv_clear(self, keys, partition_id):
        for key in keys:
            del self.tags[partition_id][key]

    def kv_batch_get(self, keys, partition_id, select_fields):
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        found = [self.fields[partition_id, key] for key in keys]
        return list_of_dict_to_tensordict([{name: each[name] for name in select_fields if name in each} for each in found])


def install(monkeypatch):
    """Put the queue in place of the package, and let verl.trainer.ppo.v1 be its files without what they need of a GPU node."""
    import verl.trainer.ppo

    queue, package = Queue(), types.ModuleType("verl.trainer.ppo.v1")
    package.__path__ = [str(Path(verl.trainer.ppo.__file__).parent / "v1")]
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1", package)
    for name in ("verl.trainer.ppo.v1.replay_buffer", "Policy_Optimization.save_rollouts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return queue
