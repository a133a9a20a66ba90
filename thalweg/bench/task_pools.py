"""Words, names and tools from which `thalweg.bench.tasks` draws its items. Pure data; changing any of it changes every
item.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

JsonValue = str | int | float | bool | list[str]

RECALL_KEYS: tuple[str, ...] = tuple(
    """
    acid acorn actor album alley amber anchor angel apple apron arch arm army arrow ash atlas attic aunt axe baby back bag bait
    ball band bank bar barn base basin basket bat bath beach bead beam bean bear beard bed bee bell belt bench berry bird
    blade blanket boat body bolt bone book boot bottle bowl box boy brain branch bread brick bridge broom brush bucket bull
    bus bush butter button cabin cage cake camel camp candle cane cap card cargo carpet cart castle cat cave cedar cellar chain chair
    chalk cheek cheese cherry chest chicken chin church circle city clam clay cliff clock cloth cloud clover club coal coast coat
    coffee coin collar comb cook copper coral cord cork corn cotton couch cow cradle crane crow crown cup curtain daisy dance dawn
    deck deer desk dish ditch dog doll donkey door dove dragon drawer dress drum duck dust eagle ear earth egg elbow elm
    engine eye face falcon fan farm father feather fence fern field finger fire fish flag flame flute fly foot forest fork fox
    frog fruit garden gate ghost gift girl glass glove goat gold goose grain grape grass hall hammer hand harbor hat hawk head
    heart hedge hen hill hook horn horse hotel house ice ink iron island ivy jacket jar jaw jewel judge juice kettle key king
    kitchen kite knee knife knight knot lady ladder lake lamb lamp leaf leather lemon letter lily lion lip lock
    log lung maple map mask meadow melon milk mill mirror monk moon moss moth mountain mouse mouth nail neck needle nest net
    night nose nurse nut oak oar ocean oil olive onion orange otter oven owl page palm pan paper park peach pearl pen pepper
    piano pig pillow pin pine pipe plate plum pocket pond porch potato prince purse queen rabbit rail rain raven ribbon rice ring
    river road robe rock roof room root rope rose sail salt sand seed shadow sheep shell ship shirt shoe silk silver sister
    snake snow soap sock song spade spoon spring star steam stick stone stool storm straw street string sugar sun swan
    """.split()
)
RECALL_VALUES: tuple[str, ...] = tuple(
    """
    able bitter black blind blue bold brave brief bright broad brown calm cheap clean clever cold cool cruel dark dear deep dry
    dull early easy empty equal fair false fast fat fine firm flat free fresh full gentle glad grand gray great green happy hard
    heavy high holy honest hot huge humble idle just keen kind large late lazy light little long loose loud low lucky mad mild
    modest narrow near neat new noble old pale plain poor proud pure quick quiet rare red rich ripe rough round sad safe
    """.split()
)

CITIES: tuple[str, ...] = tuple(
    """
    Paris London Rome Berlin Madrid Lisbon Vienna Prague Athens Dublin Oslo Cairo Lagos Nairobi Tokyo Kyoto Delhi Mumbai Sydney
    Boston Chicago Denver Dallas Austin Seattle Toronto Lima Quito Bogota Santiago Havana Geneva Zurich Milan Turin Naples Venice
    Munich Hamburg Cologne Warsaw Krakow Budapest Sofia Istanbul Beirut Dubai Doha Hanoi Manila Seoul Perth Bath York Oxford
    """.split()
)
PEOPLE: tuple[str, ...] = tuple(
    """
    Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nora Oscar Paul Quinn Rosa Sam Tina Victor Wendy
    Anna Ben Clara Daniel Elena Felix George Hannah Ivan Julia Kate Louis Martin Nina Oliver Peter Ruth Simon Thomas Ursula
    """.split()
)
CURRENCIES: tuple[str, ...] = ("USD", "EUR", "GBP", "JPY", "CHF", "INR", "BRL", "CAD")
LANGUAGES: tuple[str, ...] = ("French", "German", "Spanish", "Italian", "Greek", "Dutch", "Latin", "Polish")

Draw = Callable[[Random], tuple[str, JsonValue]]
"""Draws one argument: the words that stand in the request, and the value that must stand in the call."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tool: two spellings of its name, its JSON type, its description and how a value is drawn."""

    names: tuple[str, str]
    kind: str
    description: str
    draw: Draw

    def schema(self) -> dict[str, object]:
        """JSON schema of the parameter as it stands in the tool list."""
        if self.kind == "array":
            return {"type": "array", "items": {"type": "string"}, "description": self.description}
        return {"type": self.kind, "description": self.description}


@dataclass(frozen=True)
class ToolKind:
    """A tool in two spellings of its name, and sentences that ask for it (`{0}`, `{1}` … are its arguments in
    order).
    """

    names: tuple[str, str]
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]


def _one_of(pool: Sequence[str]) -> Draw:
    def draw(rng: Random) -> tuple[str, JsonValue]:
        word = rng.choice(pool)
        return word, word

    return draw


def _phrase(rng: Random) -> tuple[str, JsonValue]:
    text = f"{rng.choice(RECALL_VALUES)} {rng.choice(RECALL_KEYS)}"
    return f'"{text}"', text


def _code(rng: Random) -> tuple[str, JsonValue]:
    text = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2)) + f"{rng.randrange(1000):03d}"
    return text, text


def _clock(rng: Random) -> tuple[str, JsonValue]:
    text = f"{rng.randrange(24):02d}:{rng.choice((0, 15, 30, 45)):02d}"
    return text, text


def _integer(low: int, high: int) -> Draw:
    def draw(rng: Random) -> tuple[str, JsonValue]:
        value = rng.randint(low, high)
        return str(value), value

    return draw


def _number(rng: Random) -> tuple[str, JsonValue]:
    value = rng.randint(1, 999) + rng.choice((0.25, 0.5, 0.75))
    return json.dumps(value), value


def _flag(yes: str, no: str) -> Draw:
    def draw(rng: Random) -> tuple[str, JsonValue]:
        value = rng.random() < 0.5
        return (yes if value else no), value

    return draw


def _names(rng: Random) -> tuple[str, JsonValue]:
    chosen = rng.sample(PEOPLE, rng.randint(2, 3))
    return ", ".join(chosen[:-1]) + " and " + chosen[-1], chosen


TOOL_KINDS: tuple[ToolKind, ...] = (
    ToolKind(
        ("get_weather", "weather_report"),
        "Get the weather in a city",
        (
            Parameter(("city", "location"), "string", "Name of the city", _one_of(CITIES)),
            Parameter(("days", "day_count"), "integer", "How many days", _integer(1, 14)),
        ),
        ("What will the weather be in {0} for {1} days?", "Show the weather in {0} over the next {1} days."),
    ),
    ToolKind(
        ("get_time", "clock"),
        "Get the current time in a city",
        (Parameter(("city", "place"), "string", "Name of the city", _one_of(CITIES)),),
        ("What time is it in {0}?", "Tell me the time in {0}."),
    ),
    ToolKind(
        ("convert_currency", "exchange"),
        "Convert money from one currency to another",
        (
            Parameter(("amount", "sum"), "number", "Amount of money", _number),
            Parameter(("source", "from_currency"), "string", "Currency to convert from", _one_of(CURRENCIES)),
            Parameter(("target", "to_currency"), "string", "Currency to convert to", _one_of(CURRENCIES)),
        ),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?"),
    ),
    ToolKind(
        ("send_message", "write_note"),
        "Send a message to a person",
        (
            Parameter(("to", "person"), "string", "Who receives it", _one_of(PEOPLE)),
            Parameter(("text", "body"), "string", "The message", _phrase),
            Parameter(("urgent", "high_priority"), "boolean", "Whether it is urgent", _flag("an urgent", "a normal")),
        ),
        ("Send {2} message to {0} that says {1}.", "Write to {0} with {2} message: {1}."),
    ),
    ToolKind(
        ("track_parcel", "find_package"),
        "Find where a parcel is",
        (Parameter(("code", "tracking_id"), "string", "Code of the parcel", _code),),
        ("Where is parcel {0}?", "Track the parcel {0} for me."),
    ),
    ToolKind(
        ("set_alarm", "wake_up"),
        "Set an alarm",
        (
            Parameter(("time", "at"), "string", "Time as HH:MM", _clock),
            Parameter(("repeat", "daily"), "boolean", "Whether it rings every day", _flag("every day", "once")),
        ),
        ("Set an alarm at {0}, {1}.", "Wake me at {0}, {1}."),
    ),
    ToolKind(
        ("create_meeting", "schedule_meeting"),
        "Put a meeting into the calendar",
        (
            Parameter(("people", "guests"), "array", "Who takes part", _names),
            Parameter(("start", "begin"), "string", "Start as HH:MM", _clock),
            Parameter(("minutes", "duration"), "integer", "Length in minutes", _integer(10, 120)),
        ),
        ("Plan a meeting with {0} at {1} for {2} minutes.", "Set up a meeting of {2} minutes at {1} with {0}."),
    ),
    ToolKind(
        ("translate", "translate_text"),
        "Translate a text",
        (
            Parameter(("text", "phrase"), "string", "Text to translate", _phrase),
            Parameter(("language", "into"), "string", "Language to translate into", _one_of(LANGUAGES)),
        ),
        ("Translate {0} into {1}.", "How do you say {0} in {1}?"),
    ),
    ToolKind(
        ("search_flights", "find_flights"),
        "Search for flights between two cities",
        (
            Parameter(("origin", "from_city"), "string", "City of departure", _one_of(CITIES)),
            Parameter(("destination", "to_city"), "string", "City of arrival", _one_of(CITIES)),
            Parameter(("seats", "passengers"), "integer", "Number of seats", _integer(1, 9)),
        ),
        ("Find flights from {0} to {1} for {2} people.", "I need {2} seats on a flight from {0} to {1}."),
    ),
    ToolKind(
        ("roll_dice", "throw_dice"),
        "Throw dice",
        (
            Parameter(("count", "dice"), "integer", "Number of dice", _integer(1, 20)),
            Parameter(("sides", "faces"), "integer", "Sides of each die", _integer(4, 30)),
        ),
        ("Roll {0} dice with {1} sides.", "Throw {0} dice of {1} sides each."),
    ),
    ToolKind(
        ("add_item", "append_to_list"),
        "Add something to the shopping list",
        (
            Parameter(("item", "thing"), "string", "What to buy", _phrase),
            Parameter(("quantity", "how_many"), "integer", "How many", _integer(1, 50)),
        ),
        ("Put {1} of {0} on the shopping list.", "Add {1} times {0} to my shopping list."),
    ),
    ToolKind(
        ("list_events", "show_calendar"),
        "List the events of today",
        (),
        ("What is on my calendar today?", "List my events of today."),
    ),
)
