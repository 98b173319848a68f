"""Word lists of the demo corpus: characters, things, places and short definitions.

The story grammar and the small domains (arithmetic, dictionary, chat ...) draw
from these lists.  All of it was written for this project.
"""

from __future__ import annotations


def _split(text: str) -> list[str]:
    """A word list written as running text."""
    return text.split()


GIRLS = _split(
    "Lily Mia Anna Emma Sara Lucy Rosie Ella Molly Nina Zoe Ruby Clara Daisy Eva Grace Holly "
    "Ivy Jane Kate Lola Maya Nora Olive Penny Ruth Sally Tina Wendy Amy Bella Cora"
)
BOYS = _split(
    "Tom Ben Max Sam Tim Jack Leo Noah Finn Oscar Peter Adam Billy Charlie Dan Eddie Fred "
    "George Harry Henry Jake Luke Mark Ned Owen Paul Rob Toby Will Alex Hugo Theo"
)
PET_NAMES_HE = _split(
    "Pip Bobo Rusty Spot Max Biscuit Bruno Coco Dusty Fuzzy Gus Jojo Milo Nibbles Otto Patch "
    "Rocky Scout Tiny Waffle Bramble Chip Dot Felix"
)
PET_NAMES_SHE = _split(
    "Pippa Bonnie Cleo Daisy Flora Goldie Hazel Honey Kiki Lulu Mimi Nellie Pearl Poppy Rosa "
    "Suki Tilly Trixie Violet Willow Maple Luna Misty Fern"
)

ANIMALS = _split(
    "cat dog rabbit mouse bear fox duck frog bird pig cow horse sheep goat lion tiger elephant "
    "monkey owl squirrel hedgehog turtle kitten puppy hen deer penguin chick pony lamb mole bee"
)
FANTASY = _split("dragon robot fairy giant unicorn wizard ghost")
GROWN_MEN = _split("farmer baker king fisherman painter gardener shepherd sailor cook shopkeeper")
GROWN_WOMEN = _split("farmer baker queen teacher painter gardener doctor sailor cook shopkeeper")
FOREST_FOLK = _split("fox bear owl rabbit squirrel hedgehog deer mouse frog turtle duck bird")

SIZES = _split("little small tiny young")
TRAITS = _split(
    "kind brave clever curious gentle happy cheerful friendly funny quiet shy busy helpful "
    "playful careful sleepy hungry proud"
)
COLORS = _split("red blue green yellow purple pink orange white black brown silver golden")
TOYS = _split(
    "ball kite doll boat drum train truck puzzle robot balloon hat scarf book bell basket "
    "blanket whistle lantern wagon"
)
TOYS += ["teddy bear", "toy car", "toy boat"]
SMALL_THINGS = _split(
    "stone shell button feather coin key leaf flower ring ribbon bell marble seed star bead"
)
FOODS = _split(
    "cake pie soup bread cheese cookies pancakes jam porridge honey pudding salad pizza sandwiches muffins"
)
FRUITS = _split("apples pears plums cherries berries oranges peaches grapes bananas lemons")
PLACES = [
    "the park", "the forest", "the garden", "the river", "the lake", "the beach", "the hill",
    "the meadow", "the market", "the farm", "the pond", "the field", "the old mill",
    "the playground", "the woods", "the valley",
]  # fmt: skip
HOMES = [
    "a small village", "a little house by the sea", "a house near the forest", "a big town",
    "a quiet valley", "a cozy cottage", "a farmhouse on a hill", "a house with a red door",
    "a little house at the end of the road", "a small town by a river",
]  # fmt: skip
WILD_HOMES = [
    "a deep green forest", "a hole under an old tree", "a warm nest", "a barn on a farm",
    "a small cave by the river", "a quiet meadow", "a big garden", "the woods near a lake",
    "a hollow log", "a cozy den under the hill",
]  # fmt: skip
HIDING_SPOTS = [
    "under the bed", "behind the sofa", "under a bush", "behind a big tree", "in a basket",
    "under the table", "in the tall grass", "behind the door", "inside a box", "under a pile of leaves",
]  # fmt: skip
SEATS = ["on a stone", "under a tree", "on a bench", "all alone on the grass", "by the path"]
WEATHER = ["sunny", "warm", "cold", "windy", "bright", "cloudy", "rainy", "snowy", "lovely", "foggy"]

COUNTABLE = [
    ("apple", "apples"), ("ball", "balls"), ("book", "books"), ("coin", "coins"), ("egg", "eggs"),
    ("flower", "flowers"), ("cookie", "cookies"), ("shell", "shells"), ("pencil", "pencils"),
    ("stone", "stones"), ("toy", "toys"), ("cake", "cakes"), ("fish", "fish"), ("duck", "ducks"),
    ("star", "stars"), ("button", "buttons"), ("pear", "pears"), ("kite", "kites"), ("cup", "cups"),
    ("leaf", "leaves"), ("berry", "berries"), ("nut", "nuts"), ("hat", "hats"), ("bell", "bells"),
]  # fmt: skip

OPPOSITES = [
    ("big", "small"), ("hot", "cold"), ("happy", "sad"), ("up", "down"), ("day", "night"),
    ("fast", "slow"), ("old", "new"), ("open", "closed"), ("wet", "dry"), ("good", "bad"),
    ("light", "dark"), ("hard", "soft"), ("tall", "short"), ("loud", "quiet"), ("full", "empty"),
    ("early", "late"), ("rich", "poor"), ("young", "old"), ("clean", "dirty"), ("left", "right"),
    ("in", "out"), ("first", "last"), ("strong", "weak"), ("long", "short"), ("heavy", "light"),
    ("sweet", "sour"), ("near", "far"), ("high", "low"), ("yes", "no"), ("brave", "afraid"),
]  # fmt: skip

# thing, the color everyone would name
THING_COLORS = [
    ("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("the sun", "yellow"),
    ("a banana", "yellow"), ("a lemon", "yellow"), ("a frog", "green"), ("a leaf", "green"),
    ("milk", "white"), ("a strawberry", "red"), ("a carrot", "orange"), ("an orange", "orange"),
    ("coal", "black"), ("chocolate", "brown"), ("a tomato", "red"), ("a polar bear", "white"),
    ("the sea", "blue"), ("a pumpkin", "orange"), ("a fire truck", "red"), ("the night", "black"),
    ("a plum", "purple"), ("a flamingo", "pink"), ("an elephant", "gray"), ("a pig", "pink"),
]  # fmt: skip

# animal, the sound it makes, what it likes to eat, where it lives
ANIMAL_FACTS = [
    ("cat", "meow", "fish", "in a house"), ("dog", "woof", "meat", "in a house"),
    ("cow", "moo", "grass", "on a farm"), ("pig", "oink", "corn", "on a farm"),
    ("duck", "quack", "bread", "near a pond"), ("sheep", "baa", "grass", "on a farm"),
    ("horse", "neigh", "hay", "on a farm"), ("hen", "cluck", "seeds", "on a farm"),
    ("frog", "croak", "flies", "near a pond"), ("owl", "hoot", "mice", "in the forest"),
    ("lion", "roar", "meat", "on the plains"), ("bee", "buzz", "nectar", "in a hive"),
    ("mouse", "squeak", "cheese", "in a hole"), ("bird", "tweet", "worms", "in a nest"),
    ("bear", "growl", "honey", "in the forest"), ("goat", "maa", "leaves", "on a farm"),
    ("wolf", "howl", "meat", "in the forest"), ("snake", "hiss", "mice", "in the grass"),
]  # fmt: skip

# One "word|kind|definition" a line; the kind is the group the word belongs to.
DEFINITIONS = """
apple|fruit|a round fruit that grows on a tree
banana|fruit|a long yellow fruit with a soft inside
lemon|fruit|a yellow fruit that tastes sour
grape|fruit|a small round fruit that grows in bunches
cherry|fruit|a small red fruit with a stone inside
bread|food|a food made from flour and water and baked in an oven
cheese|food|a food made from milk
soup|food|a warm food made of water and vegetables
honey|food|a sweet food made by bees
cake|food|a sweet food that people eat at a party
butter|food|a soft yellow food made from milk
egg|food|a round thing that a hen lays
cat|animal|a small animal with soft fur that says meow
dog|animal|a friendly animal that barks and guards the house
rabbit|animal|a small animal with long ears that hops
mouse|animal|a tiny animal with a long tail
bear|animal|a big strong animal that sleeps in winter
fox|animal|a clever animal with red fur and a bushy tail
duck|animal|a bird that swims on the water
frog|animal|a small green animal that jumps and swims
cow|animal|a big animal that gives milk
horse|animal|a big animal that people can ride
sheep|animal|an animal that gives wool
pig|animal|a round pink animal that lives on a farm
lion|animal|a big wild cat with a loud roar
elephant|animal|a very big gray animal with a long nose
monkey|animal|an animal that climbs trees and swings on branches
owl|animal|a bird that hunts at night
bee|animal|a small flying animal that makes honey
fish|animal|an animal that lives in water
turtle|animal|a slow animal with a hard shell
squirrel|animal|a small animal that eats nuts
penguin|animal|a black and white bird that cannot fly
spider|animal|a small animal with eight legs that makes a web
butterfly|animal|an animal with four bright wings
ant|animal|a very small animal that works hard
snail|animal|a small slow animal with a round shell
chair|thing|a thing that you sit on
table|thing|a flat thing with legs where you eat or work
bed|thing|a soft thing that you sleep on
lamp|thing|a thing that gives light
door|thing|a thing that you open to go into a room
window|thing|a hole in a wall with glass in it
key|thing|a small thing that opens a lock
cup|thing|a small thing that you drink from
spoon|thing|a thing that you eat soup with
knife|thing|a sharp thing that you cut with
clock|thing|a thing that shows the time
book|thing|a thing with pages that you read
pencil|thing|a thing that you write or draw with
hat|thing|a thing that you wear on your head
shoe|thing|a thing that you wear on your foot
coat|thing|a warm thing that you wear outside
blanket|thing|a warm soft thing for your bed
basket|thing|a thing that you carry food or flowers in
umbrella|thing|a thing that keeps you dry in the rain
bell|thing|a thing that rings
mirror|thing|a glass thing that shows your face
ladder|thing|a thing that you climb to reach high places
ball|toy|a round toy that you throw and catch
kite|toy|a toy that flies in the wind
doll|toy|a toy that looks like a small person
puzzle|toy|a toy with many pieces that fit together
drum|toy|a round toy that you hit to make a sound
boat|vehicle|a thing that carries people over water
car|vehicle|a thing with four wheels that drives on roads
train|vehicle|a long machine that runs on rails
bus|vehicle|a big car that carries many people
bicycle|vehicle|a thing with two wheels that you ride
plane|vehicle|a machine that flies in the sky
tree|plant|a tall plant with leaves and branches
flower|plant|a plant with bright petals that smells sweet
grass|plant|a short green plant that covers the ground
rose|plant|a flower with a sweet smell and sharp thorns
seed|plant|a small thing that grows into a plant
leaf|plant|a flat green part of a plant
house|place|a building where people live
school|place|a place where children learn
farm|place|a place where animals and plants are raised
shop|place|a place where people buy things
garden|place|a place where flowers grow
forest|place|a place with very many trees
river|place|a long stream of water that runs to the sea
lake|place|a large water with land all around it
sea|place|a very large area of salt water
island|place|land with water all around it
hill|place|a high place that is smaller than a mountain
mountain|place|a very high place made of rock
bridge|place|a thing that you walk on to cross a river
cave|place|a dark hole in a hill
castle|place|a large strong house for a king or a queen
beach|place|sand next to the sea
library|place|a place with many books
park|place|a green place where children play
sun|sky|the bright star that warms the earth
moon|sky|the round light that you see at night
star|sky|a tiny light in the night sky
cloud|sky|a white or gray shape in the sky that holds rain
rain|weather|water that falls from the clouds
snow|weather|cold white flakes that fall in winter
wind|weather|air that moves
storm|weather|bad weather with strong wind and rain
rainbow|weather|a bow of many colors in the sky
ice|weather|water that is frozen and hard
fog|weather|a cloud that is close to the ground
farmer|person|a person who works on a farm
baker|person|a person who makes bread
teacher|person|a person who helps children learn
doctor|person|a person who helps sick people
king|person|a man who rules a country
queen|person|a woman who rules a country
friend|person|a person you like and trust
painter|person|a person who makes pictures
sailor|person|a person who works on a ship
singer|person|a person who sings songs
baby|person|a very young child
mother|person|a woman who has a child
father|person|a man who has a child
hand|body|the part at the end of your arm
foot|body|the part at the end of your leg
eye|body|the part of your face that sees
ear|body|the part of your head that hears
nose|body|the part of your face that smells
mouth|body|the part of your face that eats and talks
spring|season|the time of year when flowers begin to grow
summer|season|the warmest time of the year
autumn|season|the time of year when leaves fall
winter|season|the coldest time of the year
morning|time|the first part of the day
night|time|the dark part of the day
week|time|a time of seven days
year|time|a time of twelve months
"""

KIND_PHRASES = {
    "fruit": "a kind of fruit", "food": "a kind of food", "animal": "an animal",
    "thing": "a thing in the house", "toy": "a toy", "vehicle": "a thing that moves people",
    "plant": "a part of nature that grows", "place": "a place", "sky": "something in the sky",
    "weather": "a kind of weather", "person": "a person", "body": "a part of the body",
    "season": "a season", "time": "a part of time",
}  # fmt: skip

# Words that take no article in a definition sentence.
NO_ARTICLE = {"bread", "cheese", "soup", "honey", "butter", "grass", "rain", "snow", "wind", "ice",
              "fog", "spring", "summer", "autumn", "winter", "night", "morning"}  # fmt: skip
THE_WORDS = {"sun", "moon", "sea"}
