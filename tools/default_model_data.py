"""The seeded generator behind colibri's default model: a small grammar of conversations and stories.

Everything the model learns comes from here. A conversation is a list of messages; in a reply, `[...]` marks the words
that have to be remembered, so that training can weigh them and an evaluation can look for them. The marks are removed
before anything is tokenised (`plain`, `spans`). A `Level` says how far apart telling and asking may be: training starts
near and goes far, because from long conversations alone a model this small learns nothing for a very long time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# ---------------------------------------------------------------------------------------------------------------- words


def words(text: str) -> list[str]:
    """Words set apart by commas where one holds a space, else by spaces."""
    return [word.strip() for word in text.split("," if "," in text else None)]


NAMES = words(
    "Ada Alan Alice Amir Anna Ben Bella Carlo Clara Daniel David Diana Elena Ella Emil Emma Eva Felix Finn Frida "
    "Grace Hana Hugo Ida Ivan Jack James Jane John Julia Karl Kate Lara Laura Leo Lily Lina Linus Lucas Lucy Marco "
    "Maria Mark Martha Max Mia Milo Mira Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Peter Rosa Ruth Sam Sara "
    "Simon Sofia Tara Thomas Tim Tom Vera Victor Wanda Yuki Zoe"
)
PET_NAMES = words(
    "Bean Bella Biscuit Bruno Coco Daisy Ginger Honey Luna Max Milo Misty Pepper Rex Rusty Shadow Smoky Toby"
)
CITIES = words(
    "Athens, Berlin, Boston, Cairo, Chicago, Delhi, Dublin, Geneva, Hamburg, Kyoto, Lagos, Lima, Lisbon, London, "
    "Madrid, Milan, Munich, Oslo, Paris, Prague, Rome, Seattle, Tokyo, Vienna, Zurich, New York, San Francisco, "
    "Cape Town"
)
LANDS = words(
    "the forest, the mountains, the valley, the desert, the village, the old town, the garden, the sea, the castle, "
    "the island"
)
COLOURS = words("red blue green yellow orange purple pink brown black white grey silver golden turquoise violet")
FOODS = words("pizza pasta rice soup bread cheese salad cake pancakes noodles curry chocolate sushi potatoes")
DRINKS = words("tea coffee water milk juice lemonade cocoa")
FRUITS = words("apple banana cherry grape lemon mango orange peach pear plum")
ANIMALS = words(
    "fox cat dog bear owl rabbit horse mouse bird frog wolf lion tiger turtle duck penguin elephant hedgehog whale "
    "snail hummingbird"
)
SEASONS = words("spring summer autumn winter")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SPORTS = words("football tennis chess swimming running cycling dancing")
FLOWERS = words("rose tulip daisy lily sunflower")
JOBS = words("baker teacher doctor nurse painter farmer sailor writer singer gardener engineer cook pilot programmer")
FOLK = words("king queen girl boy baker sailor farmer wizard witch robot dragon giant painter pirate princess child")
THINGS = words("lamp boat hat key book coat bell ball cup drum ring clock kite box bag bike car umbrella stone map")
OWNED = words("car bike house door hat coat boat bag cup umbrella")
KEPT = words("key book ring map phone wallet umbrella letter")
SPOTS = words("box drawer kitchen garden cupboard car bag cellar attic garage")
COUNTS = words("two three four five six seven eight nine ten twelve twenty")
PETS = words("cat dog bird horse rabbit fish hamster parrot turtle")
KIN = words(
    "sister, brother, friend, best friend, mother, father, wife, husband, son, daughter, teacher, neighbour, boss"
)

VOCABULARY = (
    NAMES,
    PET_NAMES,
    CITIES,
    LANDS,
    COLOURS,
    FOODS,
    DRINKS,
    FRUITS,
    ANIMALS,
    SEASONS,
    DAYS,
    SPORTS,
    FLOWERS,
    JOBS,
    FOLK,
    THINGS,
    OWNED,
    KEPT,
    SPOTS,
    COUNTS,
    PETS,
)
"""The lists whose words should be whole tokens."""

UNSEEN = {
    "name": words(
        "Astrid Bertrand Cosima Dmitri Ezekiel Fatima Gwen Hiroshi Ingrid Jamal Kirsten Ludwig Priya Quentin"
    ),
    "city": words("Bergen Bogota Dakar Helsinki Krakow Nairobi Osaka Porto Reykjavik Toulouse Utrecht Warsaw"),
    "colour": words("beige crimson indigo magenta maroon teal"),
    "food": words("lasagne porridge dumplings couscous waffles"),
    "word": words("harmonica lantern velvet granite saffron tornado compass walnut"),
}
"""Words that no training conversation holds as a value: what is asked with them can only be copied, not known."""


def article(noun: str) -> str:
    """`a fox`, `an owl`: the grammar's articles follow the first letter, as its words allow."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def invented(rng: random.Random, proper: bool) -> str:
    """A word nobody knows, so that the model learns to copy what it is told instead of choosing from a list."""
    onsets = words("b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl sh st th tr")
    codas = ["", "", "", "n", "r", "l", "s", "m", "t", "ck", "x"]
    if rng.random() < 0.4:
        first, last = (rng.choice(rng.choice((NAMES, ANIMALS, JOBS, FOODS, THINGS, PET_NAMES))) for _ in range(2))
        word = (first[: rng.randint(2, len(first))] + last[rng.randint(0, len(last) - 2) :]).lower()
    else:
        counts = rng.choice((1, 2, 2, 3))
        word = "".join(rng.choice(onsets) + rng.choice("aeiou") + rng.choice(codas) for _ in range(counts))
    return word.capitalize() if proper else word


# ---------------------------------------------------------------------------------------------------------------- marks

_MARK = re.compile(r"[\[\]]")


def plain(text: str) -> str:
    """The text without the marks around remembered words."""
    return _MARK.sub("", text)


def spans(text: str) -> list[tuple[int, int]]:
    """Where the remembered words lie in `plain(text)`, as character ranges."""
    found, start, position = [], 0, 0
    for character in text:
        if character == "[":
            start = position
        elif character == "]":
            found.append((start, position))
        else:
            position += 1
    return found


def lower_first(text: str) -> str:
    """A sentence made ready to stand after a comma; `I` keeps its capital."""
    return text if re.match(r"I\b", text) else text[0].lower() + text[1:]


# ---------------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True)
class Kind:
    """One thing a user can tell about themselves: how it is told, asked for, answered, and its possible values."""

    key: str
    values: tuple[str, ...]
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    what: str
    sort: str = "word"
    proper: bool = False
    lead: str = ""
    greets: bool = False

    def value(self, rng: random.Random, unseen: bool, free: float) -> str:
        """A value: from the list, with probability `free` an invented one, or (for an evaluation) an unseen one."""
        if unseen and self.sort in UNSEEN:
            return self.lead + rng.choice(UNSEEN[self.sort])
        if self.sort == "number":
            return str(rng.randint(1, 99)) if rng.random() < 0.7 else rng.choice(COUNTS)
        if self.sort != "day" and rng.random() < free:
            word = invented(rng, self.proper)
            second = " " + invented(rng, self.proper) if self.proper and rng.random() < 0.15 else ""
            return (article(word) if self.sort == "job" else self.lead + word) + second
        return rng.choice(self.values)


def _favourite(key: str, values: list[str], sort: str = "word") -> Kind:
    name = f"favourite {key}"
    return Kind(
        name,
        tuple(values),
        (
            f"My {name} is {{v}}.",
            f"My {name} is {{v}}.",
            f"The {key} I like best is {{v}}.",
            f"My {name} has always been {{v}}.",
            f"Remember that my {name} is {{v}}.",
            f"For me the best {key} is {{v}}.",
        ),
        (
            f"What is my {name}?",
            f"What is my {name}?",
            f"Which {key} do I like best?",
            f"Do you remember my {name}?",
            f"Tell me my {name}.",
            f"Do you know what my {name} is?",
            f"And what is my {name}?",
            f"What was my {name}?",
            f"Can you tell me my {name}?",
            f"What {key} do I like?",
        ),
        f"Your {name} is [{{v}}].",
        f"your {name}",
        sort,
        sort == "city",
    )


def _being(key: str, person: bool) -> Kind:
    asks = (
        f"What is my {key} called?",
        f"What is the name of my {key}?",
        f"What is my {key}'s name?",
        f"Do you remember the name of my {key}?",
        f"Tell me the name of my {key}.",
        f"And my {key}?",
        f"Do you know my {key}'s name?",
    )
    return Kind(
        f"name of {key}",
        tuple(NAMES if person else PET_NAMES),
        (
            f"My {key} is called {{v}}.",
            f"My {key}'s name is {{v}}.",
            f"I have {article(key)} called {{v}}.",
            f"I have {article(key)} named {{v}}.",
            f"The name of my {key} is {{v}}.",
        ),
        asks + ((f"Who is my {key}?", f"What do I call my {key}?") if person else (f"How is my {key} called?",)),
        f"Your {key} is called [{{v}}].",
        f"the name of your {key}",
        "name",
        True,
    )


def _coloured(thing: str) -> Kind:
    return Kind(
        f"colour of {thing}",
        tuple(COLOURS),
        (f"My {thing} is {{v}}.", f"The colour of my {thing} is {{v}}.", f"I painted my {thing} {{v}}."),
        (
            f"What colour is my {thing}?",
            f"What colour has my {thing}?",
            f"What is the colour of my {thing}?",
            f"Do you remember the colour of my {thing}?",
            f"Which colour is my {thing}?",
        ),
        f"Your {thing} is [{{v}}].",
        f"the colour of your {thing}",
        "colour",
    )


def _kept(thing: str) -> Kind:
    return Kind(
        f"place of {thing}",
        tuple("the " + spot for spot in SPOTS),
        (
            f"My {thing} is in {{v}}.",
            f"I put my {thing} in {{v}}.",
            f"I left my {thing} in {{v}}.",
            f"I keep my {thing} in {{v}}.",
        ),
        (
            f"Where is my {thing}?",
            f"Where did I put my {thing}?",
            f"Do you know where my {thing} is?",
            f"Where can I find my {thing}?",
            f"Where did I leave my {thing}?",
        ),
        f"Your {thing} is in [{{v}}].",
        f"where your {thing} is",
        "word",
        False,
        "the ",
    )


NAME = Kind(
    "name",
    tuple(NAMES),
    (
        "My name is {v}.",
        "My name is {v}.",
        "I am {v}.",
        "I am {v}.",
        "Call me {v}.",
        "You can call me {v}.",
        "Please call me {v}.",
        "My friends call me {v}.",
        "I am called {v}.",
        "The name is {v}.",
        "This is {v}.",
    ),
    (
        "What is my name?",
        "What is my name?",
        "Who am I?",
        "Do you remember my name?",
        "What am I called?",
        "Do you know who I am?",
        "What was my name?",
        "Tell me my name.",
        "What is my name again?",
        "Do you know my name?",
        "Say my name.",
        "And what is my name?",
        "Can you tell me my name?",
    ),
    "Your name is [{v}].",
    "your name",
    "name",
    True,
    greets=True,
)
HOME = Kind(
    "home",
    tuple(CITIES),
    (
        "I live in {v}.",
        "I live in {v}.",
        "My home is in {v}.",
        "I am from {v}.",
        "I come from {v}.",
        "I moved to {v}.",
        "I have a flat in {v}.",
        "My house is in {v}.",
        "I am living in {v}.",
    ),
    (
        "Where do I live?",
        "Where do I live?",
        "Where is my home?",
        "Do you remember where I live?",
        "Where am I from?",
        "Which town do I live in?",
        "Do you know where I live?",
        "In which city do I live?",
        "Where did I say I live?",
        "And where do I live?",
        "What town do I live in?",
        "Where do I come from?",
    ),
    "You live in [{v}].",
    "where you live",
    "city",
    True,
)
AGE = Kind(
    "age",
    (),
    ("I am {v} years old.", "My age is {v}.", "I am {v} years old now.", "I turned {v} this year."),
    ("How old am I?", "What is my age?", "Do you remember how old I am?", "Do you know my age?", "Tell me my age."),
    "You are [{v}] years old.",
    "how old you are",
    "number",
)
JOB = Kind(
    "job",
    tuple(article(job) for job in JOBS),
    ("I work as {v}.", "I am {v}.", "I am {v} by trade.", "My job is to be {v}.", "For a living I work as {v}."),
    (
        "What is my job?",
        "What do I do for a living?",
        "What do I work as?",
        "Do you remember my job?",
        "Do you know what my job is?",
        "What is my work?",
    ),
    "You are [{v}].",
    "your job",
    "job",
)
NUMBER = Kind(
    "lucky number",
    (),
    ("My lucky number is {v}.", "I have a lucky number: {v}.", "The number that brings me luck is {v}."),
    (
        "What is my lucky number?",
        "Do you remember my lucky number?",
        "Which number brings me luck?",
        "Tell me my lucky number.",
        "Do you know my lucky number?",
        "And my lucky number?",
    ),
    "Your lucky number is [{v}].",
    "your lucky number",
    "number",
)

FAVOURITES = (
    _favourite("colour", COLOURS, "colour"),
    _favourite("food", FOODS, "food"),
    _favourite("animal", ANIMALS),
    _favourite("drink", DRINKS),
    _favourite("fruit", FRUITS),
    _favourite("season", SEASONS),
    _favourite("day", DAYS, "day"),
    _favourite("sport", SPORTS),
    _favourite("flower", FLOWERS),
    _favourite("city", CITIES, "city"),
    _favourite("number", [], "number"),
)
COLOUR = FAVOURITES[0]
FIRST = (
    NAME,
    COLOUR,
    HOME,
    FAVOURITES[1],
    FAVOURITES[2],
    _being("cat", False),
    _being("dog", False),
    _being("sister", True),
)
"""The kinds that training begins with."""
KINDS = {
    "common": (NAME, HOME, COLOUR),
    "favourite": FAVOURITES,
    "being": tuple(_being(pet, False) for pet in PETS) + tuple(_being(kin, True) for kin in KIN),
    "self": (AGE, JOB, NUMBER),
    "thing": tuple(_coloured(thing) for thing in OWNED) + tuple(_kept(thing) for thing in KEPT),
}


# -------------------------------------------------------------------------------------------------------------- stories

_OPEN = (
    "Once upon a time there was {a_kind} called {name}.",
    "There once was {a_kind} called {name}.",
    "Long ago there was {a_kind} called {name}.",
    "This is the story of {a_kind} called {name}.",
    "Far away there lived {a_kind} called {name}.",
)
_HOME = (
    "{name} lived in {place}.",
    "{name} lived near {place}.",
    "{name} had a small house near {place}.",
    "The home of {name} was near {place}.",
)
_MEET = (
    "On the way {name} met {a_other} called {friend}.",
    "Soon {name} met {a_other} called {friend}.",
    "Then {a_other} called {friend} came by.",
    "In the evening {name} met {a_other} called {friend}.",
)
_HELP = (
    '"I will help you," said {friend}.',
    '"Do not be sad," said {friend}.',
    '"Come with me," said {friend}.',
    "{friend} was kind and wanted to help.",
)
_WALK = (
    "They walked for {count} days.",
    "They looked behind {count} trees.",
    "They crossed {count} rivers together.",
    "Together they climbed {count} hills.",
    "They asked {count} birds for the way.",
)
_END = (
    "From that day on {name} and {friend} were good friends.",
    "{name} and {friend} danced until the sun came up.",
    "{name} was very happy and thanked {friend}.",
    "And {name} and {friend} lived happily ever after.",
    "That night {name} and {friend} slept under the stars.",
)
PLOTS = {
    "lost": (
        _OPEN,
        _HOME,
        (
            "One day {name} lost {a_colour} {thing}.",
            "{name} had {a_colour} {thing}, but one day it was gone.",
            "One morning {a_colour} {thing} was missing, and {name} was sad.",
        ),
        _MEET,
        _HELP,
        _WALK,
        (
            "At last they found the {colour} {thing} under a tree.",
            "There was the {colour} {thing}, safe and sound.",
            "Then {friend} saw the {colour} {thing} in the grass.",
        ),
        _END,
    ),
    "wish": (
        _OPEN,
        _HOME,
        (
            "More than anything {name} wanted {a_colour} {thing}.",
            "{name} dreamed of {a_colour} {thing}.",
            "Every night {name} wished for {a_colour} {thing}.",
        ),
        _MEET,
        (
            '"I know where to find one," said {friend}.',
            '"I can make one for you," said {friend}.',
            "{friend} knew a place full of treasures.",
        ),
        _WALK,
        (
            "At last {friend} gave {name} the {colour} {thing}.",
            "Now the {colour} {thing} belonged to {name}.",
            "There was the {colour} {thing}, and it was beautiful.",
        ),
        _END,
    ),
    "found": (
        _OPEN,
        _HOME,
        (
            "One day {name} found {a_colour} {thing}.",
            "One morning {a_colour} {thing} lay at the door.",
            "In the grass {name} saw {a_colour} {thing}.",
        ),
        (
            '"Whose {thing} is this?" asked {name}.',
            "{name} wanted to find out whose {thing} it was.",
            "{name} asked {count} people about it.",
        ),
        _MEET,
        (
            '"That is my {thing}!" said {friend}.',
            '"You have found my {thing}!" said {friend}.',
            "The {thing} belonged to {friend}.",
        ),
        (
            "{name} gave the {colour} {thing} back.",
            "So {friend} got the {colour} {thing} back.",
            "{friend} smiled and took the {colour} {thing}.",
        ),
        _END,
    ),
}
SLOTS = ("kind", "name", "place", "other", "friend", "colour", "thing", "count")


def cast(rng: random.Random, pinned: dict[str, str]) -> dict[str, str]:
    """Who and what a story is about: what was asked for, and the rest by chance."""
    name, friend = rng.sample(NAMES + PET_NAMES, 2)
    kind, other = rng.sample(ANIMALS + FOLK, 2)
    chosen = {
        "kind": kind,
        "name": name,
        "place": rng.choice(CITIES + LANDS),
        "other": other,
        "friend": friend,
        "colour": rng.choice(COLOURS),
        "thing": rng.choice(THINGS),
        "count": rng.choice(COUNTS),
    }
    chosen.update(pinned)
    while chosen["friend"] == chosen["name"]:
        chosen["friend"] = rng.choice(NAMES)
    while chosen["other"] == chosen["kind"]:
        chosen["other"] = rng.choice(ANIMALS)
    return chosen


def fill(template: str, chosen: dict[str, str], known: set[str]) -> str:
    """One sentence of a story, with the articles its words need; what is `known` by then is marked as remembered."""
    words = dict(chosen) | {f"a_{slot}": article(chosen[slot]) for slot in ("kind", "other", "colour")}
    used = set(re.findall(r"\{(\w+)\}", template))
    marked = {slot: f"[{word}]" if slot.removeprefix("a_") in known else word for slot, word in words.items()}
    known |= {slot.removeprefix("a_") for slot in used}
    return template.format(**marked)


def story(rng: random.Random, chosen: dict[str, str], asked: tuple[str, ...]) -> str:
    """A story of one plot; what was asked for, and whatever comes again, is marked as remembered."""
    known = set(asked)
    sections = PLOTS[rng.choice(tuple(PLOTS))]
    return " ".join(fill(rng.choice(section), chosen, known) for section in sections)


_LISTED = {
    "kind": ANIMALS + FOLK + PETS,
    "name": NAMES + PET_NAMES,
    "place": CITIES + LANDS,
    "other": ANIMALS + FOLK,
    "friend": NAMES + PET_NAMES,
    "colour": COLOURS,
    "thing": THINGS,
    "count": COUNTS,
}


def _pattern(template: str, bound: dict[str, str], pinned: dict[str, str]) -> re.Pattern[str]:
    """A template as a pattern: what is bound must repeat, what is not must come from the grammar's words."""
    parts, seen = [], set[str]()
    for literal, slot in re.findall(r"([^{]*)(?:\{(\w+)\})?", template):
        parts.append(re.escape(literal))
        if slot:
            parts.append(_slot_pattern(slot, bound, pinned, seen))
    return re.compile("".join(parts))


def _slot_pattern(slot: str, bound: dict[str, str], pinned: dict[str, str], seen: set[str]) -> str:
    base = slot.removeprefix("a_")
    words = [bound[base]] if base in bound else [pinned[base]] if base in pinned else _LISTED[base]
    if base in seen:
        return f"(?P={base})"
    seen.add(base)
    forms = "|".join(
        re.escape(article(word) if slot != base else word) for word in sorted(words, key=len, reverse=True)
    )
    return f"(?P<{base}>{forms})"


def parses(text: str, pinned: dict[str, str]) -> bool:
    """Whether a text is a whole story of this grammar about what was asked for, names and things kept throughout."""
    return any(_parse(text, plot, {}, pinned) for plot in PLOTS.values())


def _parse(text: str, sections: tuple[tuple[str, ...], ...], bound: dict[str, str], pinned: dict[str, str]) -> bool:
    if not sections:
        return not text
    for template in sections[0]:
        match = _pattern(template, bound, pinned).match(text)
        if match is None:
            continue
        found = {slot: re.sub(r"^an? ", "", word) for slot, word in match.groupdict().items()}
        rest = text[match.end() :]
        if (not rest or rest[0] == " ") and _parse(rest[1:], sections[1:], bound | found, pinned):
            return True
    return False


_REQUESTS = (
    "Tell me a story about {s}.",
    "Tell me a story about {s}.",
    "Can you tell me a story about {s}?",
    "Tell a story about {s}.",
    "I would like a story about {s}.",
    "A story about {s}, please.",
    "Please tell me a story about {s}.",
    "Do you know a story about {s}?",
    "Write a story about {s}.",
    "Now tell me a story about {s}.",
    "Could you tell me a short story about {s}?",
    "Tell me another story about {s}.",
    "I want to hear a story about {s}.",
)
_OPEN_REQUESTS = (
    "Tell me a story.",
    "Tell me another story.",
    "Please tell me a story.",
    "I would like a story.",
    "Can you tell me a story?",
    "Another story, please.",
    "A story, please.",
    "Do you know a story?",
)


def subject(rng: random.Random, free: float) -> tuple[str, dict[str, str]]:
    """What a story may be asked for, as the words of the request and as what they pin down in the story."""
    kind = invented(rng, False) if rng.random() < free else rng.choice(ANIMALS + FOLK)
    name = invented(rng, True) if rng.random() < free else rng.choice(NAMES + PET_NAMES)
    thing, colour = rng.choice(THINGS), rng.choice(COLOURS)
    city = rng.choice(CITIES)
    place = rng.choice([*LANDS, city])
    return rng.choices(
        (
            (article(kind), {"kind": kind}),
            (name, {"name": name}),
            (article(thing), {"thing": thing}),
            (place, {"place": place}),
            (f"the colour {colour}", {"colour": colour}),
            (f"something {colour}", {"colour": colour}),
            (f"{article(kind)} called {name}", {"kind": kind, "name": name}),
            (f"{article(kind)} and {article(thing)}", {"kind": kind, "thing": thing}),
            (f"{article(kind)} in {city}", {"kind": kind, "place": city}),
            (f"{article(colour)} {thing}", {"colour": colour, "thing": thing}),
            (f"{name} and {article(thing)}", {"name": name, "thing": thing}),
        ),
        weights=(10, 4, 3, 3, 1, 1, 3, 2, 2, 2, 1),
    )[0]


# ----------------------------------------------------------------------------------------------------------- small talk

SELF = "I am the small model of colibri. I remember what you tell me, and I tell short stories."
_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hi!", "Hello!", "Hello there!", "Hey!", "Good morning!", "Good evening!", "Hi there!", "Good day!"),
        ("Hello! What would you like to tell me?", "Hello! How are you?", "Hi! It is nice to talk to you."),
    ),
    (
        ("How are you?", "How are you doing?", "Are you well?", "How do you feel today?", "How is it going?"),
        ("I am fine, thank you. And you?", "Very well, thank you.", "I am fine. How are you?"),
    ),
    (
        (
            "I am fine.",
            "I am fine, thanks.",
            "I am well, thank you.",
            "Very well.",
            "I feel good today.",
            "All good here.",
        ),
        ("I am glad to hear that.", "That is good to hear."),
    ),
    (
        ("I am tired.", "I am sad today.", "I had a bad day.", "I do not feel well."),
        ("I am sorry to hear that. Would you like a story?", "I hope it gets better soon."),
    ),
    (
        ("Thanks!", "Thank you.", "Thank you very much.", "Thanks a lot!", "Great, thanks.", "Many thanks."),
        ("You are welcome.", "With pleasure."),
    ),
    (
        (
            "What can you do?",
            "What can I ask you?",
            "Help!",
            "What are you good at?",
            "How can you help me?",
            "What do you do?",
        ),
        (
            "I remember what you tell me about yourself, and I tell short stories. Ask me for one!",
            "Tell me your name, a colour or a place, and ask me later. I also tell short stories.",
        ),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Are you a robot?",
            "Are you a human?",
            "Who made you?",
            "Tell me about yourself.",
            "What is colibri?",
        ),
        (SELF,),
    ),
    (
        (
            "What is your favourite colour?",
            "What is your favourite food?",
            "Where do you live?",
            "How old are you?",
            "Do you have a cat?",
            "What is your favourite animal?",
            "Do you have a sister?",
            "What do you like?",
        ),
        ("I am only a small model. I would rather hear about you.", "I am a model, so I have none of that. And you?"),
    ),
    (
        (
            "It is raining.",
            "It is sunny today.",
            "What a nice day.",
            "It is cold outside.",
            "It snowed last night.",
            "The weather is fine.",
            "It is very hot today.",
        ),
        ("I cannot see the weather, but I believe you.", "Then it is a good day for a story."),
    ),
    (
        (
            "Ok.",
            "Okay.",
            "I see.",
            "Fine.",
            "Good.",
            "Great!",
            "Nice.",
            "Cool!",
            "Well done!",
            "Very good.",
            "Right.",
            "Yes.",
        ),
        ("I am glad.", "Good. What else would you like to tell me?"),
    ),
    (
        (
            "That was a nice story.",
            "I liked that.",
            "What a lovely story.",
            "That was fun.",
            "That was not very good.",
            "You are funny.",
            "You are nice.",
            "I like you.",
        ),
        ("Thank you! I am glad to hear what you think.",),
    ),
    (
        (
            "I went for a walk.",
            "I am reading a book.",
            "I am cooking dinner.",
            "I had coffee with friends.",
            "I am at work.",
            "I was at the market today.",
            "I am listening to music.",
            "I slept well.",
            "I am on the train.",
        ),
        ("That sounds good.", "How nice. Tell me more if you like."),
    ),
    (
        ("Goodbye!", "Bye!", "See you later.", "Good night.", "See you tomorrow!", "I have to go now."),
        ("Goodbye! I will remember what you told me.", "See you soon!"),
    ),
    (("Are you still there?", "Can you hear me?", "Hello, are you there?"), ("Yes, I am here.",)),
    (
        (
            "Will you remember that?",
            "Do you remember what I told you?",
            "Can you remember things?",
            "Do not forget it.",
            "Please do not forget.",
        ),
        ("Yes, I remember what you tell me. Just ask.", "I will not forget it."),
    ),
    (
        (
            "What do you know about me?",
            "What did I tell you?",
            "What do you remember?",
            "What have I told you about me?",
            "Tell me everything you know about me.",
            "What did I tell you about me?",
        ),
        ("Ask me about one thing at a time, and I will tell you.",),
    ),
    (
        (
            "Do you like stories?",
            "Do you like music?",
            "Do you sleep?",
            "Can you see?",
            "Do you dream?",
            "Are you happy?",
        ),
        ("I am only a small model, but I like to talk.",),
    ),
    (("No.", "No, thanks.", "Not now.", "Maybe later.", "Never mind.", "Forget it."), ("All right.", "As you wish.")),
    (
        ("Let us talk.", "I am bored.", "Talk to me.", "Say something.", "What now?", "What shall we do?"),
        ("Tell me something about you, or ask me for a story.",),
    ),
)
_BEYOND = (
    "What is the capital of {city}?",
    "How do I cook {food}?",
    "Who was {name} {name2}?",
    "What is {n} plus {m}?",
    "Why is the sky blue?",
    "What is the time?",
    "What day is it today?",
    "Who is the king of {city}?",
    "Write a poem about {thing}.",
    "How far is it to {city}?",
    "What is a {word}?",
    "Translate {word} into French.",
    "Write a program that sorts numbers.",
    "What is the meaning of life?",
    "How does a {thing} work?",
    "What is the news?",
    "Can you play {word}?",
    "How many people live in {city}?",
    "Explain {word} to me.",
    "What do you think about {word}?",
    "Is {food} healthy?",
    "What should I eat today?",
    "What is {n} times {m}?",
    "Who won the game?",
    "{word} {word2} {word}.",
    "{word}?",
    "Where is {city}?",
    "Do you know {name} {name2}?",
)
_BEYOND_REPLIES = ("I do not know that. I am a very small model.", "That is too hard for me. I am a very small model.")


def small_talk(rng: random.Random) -> tuple[str, str]:
    """One exchange that tells the model nothing it has to remember."""
    if rng.random() < 0.2:
        words = {
            "city": rng.choice(CITIES),
            "food": rng.choice(FOODS),
            "name": rng.choice(NAMES),
            "thing": rng.choice(THINGS),
            "name2": invented(rng, True),
            "n": rng.randint(1, 99),
            "m": rng.randint(1, 99),
            "word": invented(rng, False),
            "word2": invented(rng, False),
        }
        return rng.choice(_BEYOND).format(**words), rng.choice(_BEYOND_REPLIES)
    user, reply = rng.choice(_TALK)
    return rng.choice(user), rng.choice(reply)


# -------------------------------------------------------------------------------------------------------- conversations

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a small and friendly model.",
    "You are colibri.",
    "Answer briefly.",
    "You remember what the user tells you.",
)
_AMERICAN = (("colour", "color"), ("favourite", "favorite"), ("neighbour", "neighbor"), ("grey", "gray"))
_SHORT = (
    ("What is ", "What's "),
    ("I am ", "I'm "),
    ("Where is ", "Where's "),
    ("Who is ", "Who's "),
    ("do not", "don't"),
    ("It is ", "It's "),
)


@dataclass(frozen=True)
class Message:
    """One message; a reply may carry marks, and says what sort of answer it is so that scores can be kept apart."""

    role: str
    text: str
    sort: str = "talk"
    pinned: dict[str, str] = field(default_factory=dict)
    gap: int = 0


@dataclass(frozen=True)
class Level:
    """How hard a conversation may be: facts told, exchanges between telling and asking, and what else happens."""

    facts: int
    gap: int
    kinds: str = "all"
    stories: float = 0.0
    unknown: float = 0.0
    updates: float = 0.0
    tale: float = 0.0


LEVELS = (
    Level(facts=2, gap=0, kinds="first"),
    Level(facts=3, gap=1, kinds="first", unknown=0.1),
    Level(facts=3, gap=2, unknown=0.4, updates=0.1, stories=0.05, tale=0.05),
    Level(facts=4, gap=4, unknown=0.4, updates=0.35, stories=0.12, tale=0.1),
    Level(facts=5, gap=7, unknown=0.4, updates=0.35, stories=0.15, tale=0.15),
    Level(facts=6, gap=12, unknown=0.4, updates=0.35, stories=0.15, tale=0.15),
    Level(facts=6, gap=20, unknown=0.4, updates=0.35, stories=0.15, tale=0.15),
    Level(facts=7, gap=34, unknown=0.4, updates=0.35, stories=0.15, tale=0.15),
)


class Conversation:
    """A conversation being made: its messages so far, and what the model has been told in them."""

    def __init__(self, rng: random.Random, level: Level, unseen: bool = False, free: float = 0.25) -> None:
        self.rng, self.level, self.unseen, self.free = rng, level, unseen, free
        self.messages: list[Message] = []
        self.facts: dict[str, tuple[Kind, str, int]] = {}
        self.casual = rng.choices((0.0, 0.5, 1.0), weights=(5, 3, 2))[0]
        if rng.random() < 0.12:
            self.messages.append(Message("system", rng.choice(SYSTEMS)))

    @property
    def exchanges(self) -> int:
        return sum(message.role == "user" for message in self.messages)

    def say(
        self, user: str, reply: str, sort: str = "talk", pinned: dict[str, str] | None = None, gap: int = 0
    ) -> None:
        self.messages += [Message("user", user), Message("assistant", reply, sort, pinned or {}, gap)]

    # How people type

    def style(self) -> Callable[[str], str]:
        """How the next message is typed: as written, or without capitals, full stops, or British spelling."""
        rng = self.rng
        careless = rng.random() < self.casual
        lower, bare = careless and rng.random() < 0.6, careless and rng.random() < 0.7
        american, short, polite = rng.random() < 0.2, rng.random() < 0.35, rng.random() < 0.04

        def typed(text: str) -> str:
            for long, brief in _SHORT if short else ():
                text = text.replace(long, brief)
            for british, other in _AMERICAN if american else ():
                text = text.replace(british, other)
            if polite and text.endswith("?"):
                text = text[:-1] + ", please?"
            if bare:
                text = text.rstrip(".?!").replace("'s ", "s ") if rng.random() < 0.5 else text.rstrip(".?!")
            return text.lower() if lower else text

        return typed

    def new_kind(self) -> Kind | None:
        """A kind of fact that has not been told yet, the common ones more often."""
        for _ in range(20):
            pool = (
                FIRST
                if self.level.kinds == "first"
                else KINDS[self.rng.choices(tuple(KINDS), weights=(5, 5, 4, 2, 3))[0]]
            )
            kind = self.rng.choice(pool)
            if kind.key not in self.facts:
                return kind
        return None

    # What happens

    def _typed_fact(self, kind: Kind, typed: Callable[[str], str]) -> tuple[str, str]:
        """A sentence that tells a fact, and its value just as it was typed."""
        told = self.facts[kind.key][1].lower() if kind.key in self.facts else ""
        value = kind.value(self.rng, self.unseen, self.free)
        while value.lower() == told:
            value = kind.value(self.rng, self.unseen, self.free)
        value = typed("x " + value + " x")[2:-2]
        return self.rng.choice(kind.tells).replace("{v}", value), value

    def tell(self, update: Kind | None = None) -> None:
        """The user tells a fact, or two at once, or corrects one."""
        kind, typed, rng = update or self.new_kind(), self.style(), self.rng
        if kind is None:
            return self.chat()
        sentence, value = self._typed_fact(kind, typed)
        self.facts[kind.key] = (kind, value, self.exchanges)
        if update:
            lead = rng.choice(
                ("Actually, ", "Now ", "No, ", "Sorry, ", "Wait, ", "From now on ", "I changed my mind: ", "")
            )
            sentence = lead + lower_first(sentence) if lead else sentence
            reply = "All right. " + kind.answer.replace("{v}", value)
            return self.say(typed(sentence), rng.choice((reply, reply, "All right, I will remember that.")), "ack")
        if rng.random() < 0.25:
            sentence = rng.choice(
                ("Hi, ", "Hello, ", "Hey, ", "By the way, ", "You know, ", "Well, ", "And ")
            ) + lower_first(sentence)
        second = self.new_kind() if rng.random() < 0.15 and self.level.facts > 2 else None
        if second:
            other, other_value = self._typed_fact(second, typed)
            self.facts[second.key] = (second, other_value, self.exchanges)
            joined = sentence[:-1] + " and " + lower_first(other) if rng.random() < 0.6 else sentence + " " + other
            return self.say(typed(joined), "Thank you, I will remember both.", "ack")
        self.say(typed(sentence), self._acknowledgement(kind, value), "ack")

    def _acknowledgement(self, kind: Kind, value: str) -> str:
        rng = self.rng
        if kind.greets and rng.random() < 0.7:
            return rng.choice(("Nice to meet you, [{v}].", "Hello, [{v}]!", "Hello, [{v}]. How are you?")).replace(
                "{v}", value
            )
        if rng.random() < 0.4:
            return "So " + lower_first(kind.answer).replace("{v}", value)
        return rng.choice(
            ("Thank you, I will remember that.", "I will remember that.", "That is good to know.", "How nice!")
        )

    def ask(self, kind: Kind) -> None:
        """The user asks for a fact; the reply is its last value, or honest about not knowing it."""
        typed, rng = self.style(), self.rng
        question = typed(rng.choice(kind.asks))
        if kind.key not in self.facts:
            return self.say(question, f"You have [not] told me {kind.what}.", "unknown")
        _, value, told = self.facts[kind.key]
        self.say(question, kind.answer.replace("{v}", value), "recall", gap=self.exchanges - told - 1)

    def tell_story(self) -> None:
        """The user asks for a story, sometimes about themselves or their pet, and perhaps about its details."""
        typed, rng = self.style(), self.rng
        own = self._own_subject() if rng.random() < 0.15 else None
        if "name" not in self.facts and self.level.unknown and rng.random() < 0.05:
            request = typed(rng.choice(_REQUESTS).replace("{s}", "me"))
            return self.say(request, f"You have [not] told me {NAME.what}.", "unknown")
        words, pinned = own or subject(rng, self.free / 2) if own or rng.random() < 0.9 else ("", {})
        request = rng.choice(_REQUESTS).replace("{s}", words) if words else rng.choice(_OPEN_REQUESTS)
        chosen = cast(rng, pinned)
        self.say(typed(request), story(rng, chosen, tuple(pinned)), "story", pinned)
        if rng.random() < 0.35:
            self._ask_about_story(chosen)

    def _own_subject(self) -> tuple[str, dict[str, str]] | None:
        known = [(pet, self.facts[f"name of {pet}"][1]) for pet in PETS if f"name of {pet}" in self.facts]
        if known and self.rng.random() < 0.5:
            pet, name = self.rng.choice(known)
            return f"my {pet}", {"kind": pet, "name": name}
        if "name" in self.facts:
            return "me", {"name": self.facts["name"][1]}
        return None

    def _ask_about_story(self, chosen: dict[str, str]) -> None:
        typed = self.style()
        question, reply = self.rng.choice(
            (
                ("What was the {kind} called?", "The {kind} was called [{name}]."),
                ("What was the name of the {kind}?", "The {kind} was called [{name}]."),
                ("What colour was the {thing}?", "The {thing} was [{colour}]."),
                ("Where did {name} live?", "{name} lived near [{place}]."),
                ("Who did {name} meet?", "{name} met [{friend}]."),
            )
        )
        self.say(typed(question.format(**chosen)), reply.format(**chosen), "detail")

    def chat(self) -> None:
        user, reply = small_talk(self.rng)
        self.say(self.style()(user), reply)

    def pass_time(self, kept: set[str]) -> None:
        """One exchange between telling and asking; the facts in `kept` stay unmentioned."""
        level, rng = self.level, self.rng
        loose = [kind for key, (kind, _, _) in self.facts.items() if key not in kept]
        if rng.random() < level.stories:
            return self.tell_story()
        draw = rng.random()
        if draw < 0.2 and len(self.facts) < level.facts + 6:
            return self.tell()
        if draw < 0.4 and loose:
            return self.ask(rng.choice(loose))
        if draw < 0.45 and level.unknown and (kind := self.new_kind()):
            return self.ask(kind)
        if draw < 0.45 + 0.3 * level.updates and loose:
            return self.tell(rng.choice(loose))
        self.chat()

    def ask_in_the_end(self, kept: list[str]) -> None:
        """Every kept fact is asked for, unknown ones among them."""
        level, rng = self.level, self.rng
        for key in kept:
            if rng.random() < level.unknown and (kind := self.new_kind()):
                self.ask(kind)
            self.ask(self.facts[key][0])
            if rng.random() < 0.08:
                self.chat()


def remembering(
    rng: random.Random, level: Level, gap: int | None = None, unseen: bool = False, free: float = 0.25
) -> list[Message]:
    """A conversation that tells facts, lets `gap` exchanges pass (by chance up to the level's), and asks for them."""
    talk = Conversation(rng, level, unseen, free)
    if rng.random() < 0.2 and level.gap:
        talk.chat()
    for _ in range(rng.randint(1, level.facts)):
        talk.tell()
    if rng.random() < level.updates and talk.facts:
        talk.tell(rng.choice([kind for kind, _, _ in talk.facts.values()]))
    kept = list(talk.facts)
    rng.shuffle(kept)
    kept = kept[: rng.randint(max(1, len(kept) - 2), len(kept))] if kept else []
    until = talk.exchanges + (rng.randint(0, level.gap) if gap is None else gap)
    while talk.exchanges < until:
        talk.pass_time(set(kept))
    talk.ask_in_the_end(kept)
    return talk.messages


def telling(rng: random.Random, level: Level, free: float = 0.25) -> list[Message]:
    """A short conversation around one or two stories, or small talk alone."""
    talk = Conversation(rng, level, free=free)
    for _ in range(rng.randint(1, 3)):
        act = rng.choices((talk.tell_story, talk.chat, talk.tell), weights=(6, 3, 1))[0]
        act()
    if level.unknown and rng.random() < 0.3 and (kind := talk.new_kind()):
        talk.ask(kind)
    return talk.messages


SHARES = (1, 1, 6, 6, 4, 2, 1, 2)
"""How often each level is drawn: a near question teaches as much as a far one, and costs far fewer tokens."""


def conversation(rng: random.Random, stage: int) -> list[Message]:
    """A conversation for training at a stage, from its level or one before it."""
    level = rng.choices(LEVELS[: stage + 1], weights=SHARES[: stage + 1])[0]
    return telling(rng, level) if rng.random() < level.tale else remembering(rng, level)


def conversations(seed: str, stage: int, count: int) -> Iterator[list[Message]]:
    """The same conversations for the same seed, whatever was made before."""
    rng = random.Random(seed)
    return (conversation(rng, stage) for _ in range(count))
