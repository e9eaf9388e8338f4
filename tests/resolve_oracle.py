"""The replacement rule in plain Python, over an `OrderedDict`; knows nothing of the code under test."""

import collections
import dataclasses


@dataclasses.dataclass
class Outcome:
    rows: list[list[int]]
    plan: list[tuple[int, int, int]]  # host row, row, slot
    counts: dict[str, int]
    num_homeless: int = 0


class HotRegion:
    """One request and layer: slot -> host row or -1, in LRU order."""

    def __init__(self, num_slots: int):
        self.slots: collections.OrderedDict[int, int] = collections.OrderedDict((slot, -1) for slot in range(num_slots))

    @property
    def table(self) -> list[int]:
        return [self.slots[slot] for slot in range(len(self.slots))]

    @property
    def order(self) -> list[int]:
        return list(self.slots)

    def forget(self, blocks: set[int], page_entries: int) -> None:
        for slot, host_row in self.slots.items():
            if host_row >= 0 and host_row // page_entries in blocks:
                self.slots[slot] = -1

    def swap(self, needed: list[int]) -> tuple[dict[int, int], list[int]]:
        """Finds or makes a slot for each distinct host row: `(host row -> slot, the rows missed, in order)`."""
        distinct = dict.fromkeys(needed)
        holder = {host_row: slot for slot, host_row in self.slots.items() if host_row >= 0}
        missed = [host_row for host_row in distinct if host_row not in holder]
        hit = [slot for slot, host_row in self.slots.items() if host_row >= 0 and host_row in distinct]
        kept = set(hit)
        victims = [slot for slot in self.slots if slot not in kept][: len(missed)]
        for slot, host_row in zip(victims, missed, strict=True):
            self.slots[slot], holder[host_row] = host_row, slot
            self.slots.move_to_end(slot)
        for slot in hit:
            self.slots.move_to_end(slot)
        return {host_row: holder[host_row] for host_row in distinct}, missed


def step(region: HotRegion, topk, num_entries, row_valid, first_new, resident, host, hot, *, entries, row_step, num_host_blocks):
    """One transaction of one request; arguments as lists, `entries` per page. Changes `region`."""
    owns_region = all(block != 0 for block in hot)
    counts: dict[str, int] = dict.fromkeys(("resident", "newest", "hot", "miss", "invalid"), 0)
    places, needed, num_homeless = [], [], 0
    for indices, bound, valid in zip(topk, num_entries, row_valid, strict=True):
        line = []
        for j in indices:
            place = None
            if valid and 0 <= j < bound:
                page, slot = divmod(j, entries)
                known = page < len(resident)
                if known and resident[page] != 0:
                    place = ("row", resident[page] * row_step + slot)
                    counts["newest" if j >= first_new else "resident"] += 1
                elif known and 0 < host[page] < num_host_blocks and owns_region and j < first_new:
                    place = ("host", host[page] * entries + slot)
                    needed.append(place[1])
                else:
                    num_homeless += 1
            if valid and place is None:
                counts["invalid"] += 1
            line.append(place)
        places.append(line)

    slot_of, missed = region.swap(needed)
    counts["miss"], counts["hot"] = len(missed), len(needed) - len(missed)

    def hot_row(slot):
        return hot[slot // entries] * row_step + slot % entries

    def resolve(place):
        if place is None:
            return -1
        return place[1] if place[0] == "row" else hot_row(slot_of[place[1]])

    rows = [[resolve(place) for place in line] for line in places]
    plan = [(host_row, hot_row(slot_of[host_row]), slot_of[host_row]) for host_row in missed]
    return Outcome(rows, plan, counts, num_homeless)
