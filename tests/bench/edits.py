"""Owns the edit tasks: ten prompts of 200 to 600 tokens whose answers copy much of them, or little.

The first half asks for a text with a small change, the kind of work whose answer is mostly in the prompt. The second
half asks for something about a text, so that the answer's words are largely new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.stories import Messages


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        source: the text to work on, which the client would supply to be echoed.
        copies: the answer is mostly the source.
    """

    name: str
    instruction: str
    source: str
    copies: bool

    @property
    def messages(self) -> Messages:
        return [{"role": "user", "content": f"{self.instruction}\n\n{self.source}"}]


_AREA = '''def total_area(rectangles, scale=1.0):
    """Return the area of all rectangles together."""
    total = 0.0
    for rectangle in rectangles:
        width, height = rectangle.width, rectangle.height
        if width <= 0 or height <= 0:
            raise ValueError("a rectangle needs a positive width and height")
        total += width * height * scale
    return total


def largest(rectangles):
    """Return the rectangle with the largest area, or None."""
    best = None
    for rectangle in rectangles:
        area = rectangle.width * rectangle.height
        if best is None or area > best.width * best.height:
            best = rectangle
    return best


def describe(rectangle):
    """Return a line of text about one rectangle."""
    width, height = rectangle.width, rectangle.height
    shape = "square" if width == height else "rectangle"
    return f"a {shape} of {width} by {height}, {width * height} in all"'''

_INVENTORY = '''class Inventory:
    """Counts of items in a warehouse."""

    def __init__(self, name):
        self.name = name
        self.items = {}

    def add(self, item, count=1):
        if count < 1:
            raise ValueError("count must be at least 1")
        self.items[item] = self.items.get(item, 0) + count

    def remove(self, item, count=1):
        present = self.items.get(item, 0)
        if present < count:
            raise KeyError(f"only {present} of {item} left")
        self.items[item] = present - count
        if self.items[item] == 0:
            del self.items[item]

    def total(self):
        return sum(self.items.values())

    def report(self):
        lines = [f"{self.name}: {self.total()} items"]
        for item, count in sorted(self.items.items()):
            lines.append(f"  {item}: {count}")
        return "\\n".join(lines)'''

_HARBOUR = (
    "The harbour of Lindow lies in a narrow bay between two cliffs. In the moning the fishing boats leave before "
    "sunrise, and by noon they come back with herring, mackerel and sometimes a few lobsters. The market opens at two "
    "o'clock. Families from the villages arround walk down the steep road to buy fish, bread and vegetables, and the "
    "children watch the boats being cleaned. In winter the bay is often covered with fog, so the keeper of the old "
    "lighthouse rings a bell every ten minutes until the last boat has returned. The bell was cast in 1842 and can be "
    "heard for three miles. Visitors are welcome to climb the tower, from which the whole coast can be seen. On the "
    "first Sunday of June the whole village meets at the pier, and the oldest captain reads the names of all boats "
    "that were ever built there."
)

_GARDEN = (
    "A good garden begins with the soil. Before planting anything, dig the ground to the depth of a spade, remove the "
    "stones and the roots of old plants, and mix in a bucket of compost for every square metre. Water the ground well "
    "and let it rest for a week. Plant tomatoes where they get sun for at least six hours a day, and leave half a "
    "metre between them. Beans can grow closer together, but they need poles to climb. Lettuce prefers some shade in "
    "the afternoon. Water in the early morning, not at noon, and pour the water on the soil instead of the leaves. "
    "After the harvest, cover the beds with straw to protect the soil from the rain. Keep the tools dry, and sharpen "
    "the spade before the first frost, because a sharp spade saves half of the work in spring."
)

_CONFIG = """server:
  host: 0.0.0.0
  port: 8080
  workers: 4
  timeout_seconds: 30
logging:
  level: info
  file: /var/log/service/service.log
  rotate_megabytes: 100
database:
  host: db.internal
  port: 5432
  name: orders
  user: service
  pool_size: 10
  ssl: true
cache:
  host: cache.internal
  port: 6379
  ttl_seconds: 600
features:
  search: true
  recommendations: false
  export: true
mail:
  host: mail.internal
  port: 587
  sender: orders@example.org"""

_WHOLE = "the whole corrected paragraph"

TASKS: Final = (
    Task("rename", "Rename the method add to put in this class. Print the complete class.", _INVENTORY, copies=True),
    Task("class", "Repeat this code exactly, but rename the class Inventory to Stock.", _INVENTORY, copies=True),
    Task("typos", f"Fix the spelling mistakes in this paragraph and return {_WHOLE}.", _HARBOUR, copies=True),
    Task("metre", "Repeat this text word for word, but write meter instead of metre.", _GARDEN, copies=True),
    Task("config", "Repeat this file exactly, but set the number of workers to 8.", _CONFIG, copies=True),
    Task("explain", "Explain in your own words what this code does.", _AREA, copies=False),
    Task(
        "review", "What could go wrong when several threads use this class? Answer in prose.", _INVENTORY, copies=False
    ),
    Task("continue", "Write a short story about a child who grows up in this place.", _HARBOUR, copies=False),
    Task("questions", "Think of five questions that a beginner might ask after reading this.", _GARDEN, copies=False),
    Task("letter", "Write a letter that explains these settings to a new colleague.", _CONFIG, copies=False),
)
