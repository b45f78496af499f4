"""The words of generated texts. Order matters: seeds pick by place."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIRLS = _split(
    "Anna Mary Jane Lucy Emma Clara Rose Alice Ruth Sarah Nora Ella Grace Martha Helen Lydia Ida "
    "Olive Vera Mina"
)
BOYS = _split(
    "Tom John Peter Henry Sam David Mark Paul James Simon Ben Daniel Oscar Hugo Leo Adam Felix "
    "Otto Ralph Max"
)
ANIMALS = _split("cat dog fox bear goat horse duck mouse rabbit owl frog hen wolf deer goose lamb")
COLOURS = _split("red blue green yellow black white brown grey purple orange pink silver")
OBJECTS = _split(
    "kite lamp book ball box key ring cup hat boat drum bell coat map flute basket ladder mirror "
    "candle wheel clock spoon blanket whistle button ribbon stone shell coin letter"
)
PLACES = _split(
    "garden forest river market school barn kitchen harbour meadow tower mill bridge village "
    "castle lake hill beach library orchard station"
)
FOODS = _split("bread cheese soup apples honey cake plums rice beans tea milk pie nuts pears")
FEELINGS = _split("happy sad proud tired brave afraid calm angry curious glad")
WEATHERS = ("sunny", "windy", "rainy", "snowy", "foggy", "warm", "cold", "cloudy")
DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
CITIES = _split(
    "Rome Paris London Berlin Madrid Oslo Vienna Athens Dublin Lisbon Prague Cairo Lima Tokyo"
)
ROLES = _split("farmer teacher sailor baker king queen miller doctor hunter painter gardener judge")
