"""More ways to ask what the arena asks, for training only: a kind of question is not to be known by two sentences.

The arena's workers cannot read these; labels come from the question as the arena wrote it. No sentence here shares four
words in a row with a held-out phrasing of the arena (tests/policy/test_warmstart.py holds that).
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from policy.arena.phrasing import Values
from policy.arena.tasks import Problem, understand

MORE: Mapping[str, tuple[str, ...]] = {
    "crates": (
        "{n2} baskets hold {n1} {thing} apiece. {who} eats {n3} {thing}. What number of {thing} is still there?",
        "A farmer named {who} loads {n2} carts, {n1} {thing} on each cart, and drops {n3}. How many arrive?",
        "Take {n2} rows of {n1} {thing}. Remove {n3} of them. {who} asks how many stand there now.",
        "{who} bought {n2} packs. One pack has {n1} {thing}. After using {n3} {thing}, what does {who} own?",
        "Out of {n2} drawers with {n1} {thing} inside each, {who} lent {n3}. Say how many {thing} she has at home.",
        "The shop got {n2} deliveries of {n1} {thing} and returned {n3}. What was the stock of {thing} for {who} then?",
    ),
    "shares": (
        "{who} and others collected {n1} shells in the morning, {n2} shells after lunch, and {n3} children get the "
        "same number. How many shells has each child?",
        "Add {n1} cents and {n2} cents, then give {n3} people the same amount. What does {who} as one of them get?",
        "A prize of {n1} euros and a gift of {n2} euros go to {n3} winners alike. How much per winner, says {who}?",
        "{who} cooked {n1} dumplings, then {n2} dumplings. They fill {n3} plates evenly. How many lie on one plate?",
        "In two days {who} read {n1} pages and {n2} pages over {n3} sittings of equal length. Pages per sitting?",
        "Split the total of {n1} tickets and {n2} tickets fairly between {n3} classes of {who}. Tickets for a class?",
    ),
    "convert": (
        "{n1} {unit1} is how many {unit2}?",
        "Turn {n1} {unit1} into {unit2}, please.",
        "The recipe gives {n1} {unit1}. I need it in {unit2}. What do I write?",
        "If something takes up {n1} {unit1}, what is that in {unit2}?",
        "Change the unit: {n1} {unit1}, wanted in {unit2}. Number only.",
        "Our old plan has {n1} {unit1} on it. In {unit2} this makes how much?",
        "Say {n1} {unit1} with {unit2} as the unit.",
    ),
    "mixed": (
        "{n1} {unit1} and {n2} {unit2}: how many {unit2} is that in total?",
        "Add up {n1} {unit1} and {n2} {unit2}; the total should be given in {unit2}.",
        "How much is {n1} {unit1} with {n2} {unit2} on top, told in {unit2}?",
        "A record of {n1} {unit1} {n2} {unit2} must go into a column for {unit2}. Which number belongs there?",
        "My watch shows {n1} {unit1} and then {n2} {unit2} more. Convert all of this to {unit2}.",
        "Sum of {n1} {unit1} and {n2} {unit2} as a plain count of {unit2}?",
    ),
    "deadline": (
        "{who} borrowed a book on {date} for {n} days. When must it be back? Form: YYYY-MM-DD.",
        "What is the date {n} days past {date}? {who} needs it as YYYY-MM-DD.",
        "A visa given to {who} on {date} is good for {n} days. When does it run out (YYYY-MM-DD)?",
        "From {date}, {who} waits {n} days for a parcel. On what date will it come? YYYY-MM-DD.",
        "Add {n} days to {date} and tell {who} the date in the style YYYY-MM-DD.",
        "{who} plants seeds on {date} that sprout {n} days later. Write the date of sprouting, YYYY-MM-DD.",
    ),
    "gap": (
        "Count the days between {date1} and {date2}.",
        "What is the difference of {date2} and {date1} as a number of days?",
        "I was born on {date1}; my sister on {date2}. How many days younger is she?",
        "The strike lasted from {date1} to {date2}. Give its duration as a count of days.",
        "It was {date1} when we ordered and {date2} when the box came. How many days did that take?",
        "How long, in days, is the stretch of time that starts {date1} and stops {date2}?",
        "Since {date1}, how many days had gone by on {date2}?",
    ),
    "cell": (
        "Table of goods, first column price, last column stock: {rows}. Look up the stock for {thing}.",
        "{rows}. These are prices and stocks. How many {thing} are in stock?",
        "A store lists price, stock for everything it has: {rows}. The number of {thing} in store is what?",
        "Here are rows of name, price, stock: {rows}. From the row of {thing}, read the stock.",
        "Find {thing} in this table and tell me how much of it there is (price, stock): {rows}.",
    ),
    "highest": (
        "Table of goods, first column price, last column stock: {rows}. Which row has the biggest price?",
        "{rows}. These are prices and stocks. Which thing costs the most?",
        "A store lists price, stock for everything it has: {rows}. What is its most expensive article?",
        "Here are rows of name, price, stock: {rows}. Find the name with the maximum price.",
        "Look for the greatest price in this table (price, stock) and name the good: {rows}.",
    ),
    "backwards": (
        'Reverse the letters of "{word}" and use upper case.',
        'What is "{word}" spelled in reverse? Upper case only.',
        'Flip the string "{word}" and make every letter a capital.',
        'Starting at the end of "{word}", write letter after letter in capitals until you reach its start.',
        'The code is made by reversing "{word}" and writing it large, in capitals. What is the code?',
        'Give "{word}" in reversed order, capitals please.',
    ),
    "swap": (
        'Swap {letter1} for {letter2} in "{word}".',
        'Replace {letter1} with {letter2} everywhere in "{word}" and give the string.',
        'What does "{word}" turn into when every {letter1} becomes {letter2}?',
        'Write "{word}" again, but use {letter2} where there is a {letter1}.',
        'A child confuses letters: it reads {letter1} as {letter2}. How does it read "{word}"?',
        'Substitute the letter {letter2} for {letter1} throughout the word "{word}".',
    ),
    "sorting": (
        "Sort {nums} in descending order, with commas.",
        "Arrange {nums} from highest to lowest.",
        "Order this list, top number first: {nums}. Commas between the numbers.",
        "Which order do {nums} have when you start at the maximum and go down? Use commas.",
        "{nums}: list these again, largest first, smallest last.",
        "Line up the marks {nums} beginning with the greatest, comma after each.",
    ),
    "evens": (
        "Filter {nums}: only even numbers stay. Commas between them.",
        "Remove the odd numbers in {nums} and list the others.",
        "List the even numbers among {nums} as they come, with commas.",
        "{nums}: copy this list without its odd members.",
        "Select what is divisible by two out of this list and leave its order alone: {nums}.",
        "I do not like odd numbers. Clean them out of {nums} for me, commas between.",
    ),
    "change": (
        "{rows} are prices. {who} takes {n1} bags of {thing} and gives {n2} coins. What does {who} get back?",
        "Look at the price list {rows}. After {n1} bags of {thing}, how much is left of the {n2} coins of {who}?",
        "{who} has {n2} coins and wants {n1} bags of {thing}. Prices: {rows}. How many coins remain in the purse?",
        "A bag costs what this list says: {rows}. Subtract {n1} bags of {thing} from {n2} coins for {who}.",
        "Prices per bag are {rows}. Work out what {who} keeps of {n2} coins after buying {n1} bags of {thing}.",
        "The market asks these coins a bag: {rows}. {who} puts {n2} coins down for {n1} bags of {thing}. And back?",
    ),
    "freight": (
        "Kilograms by good: {rows}. How many grams of {thing} is that?",
        "{rows}, all in kilograms. Convert the entry for {thing} to grams.",
        "We weighed the goods in kilograms, {rows}. I need {thing} in grams.",
        "Find {thing} in this list of kilograms, {rows}, and turn its figure into grams.",
        "Table of mass (kilograms): {rows}. Express the mass of {thing} as grams.",
        "The truck carries, in kilograms, {rows}. How heavy is {thing} if grams are the unit?",
    ),
    "pieces": (
        "Ribbon lengths in metres: {rows}. Cut the {thing} ribbon into bits of {n} centimetres. How many bits?",
        "{rows} are lengths in metres. How often do {n} centimetres fit into the length for {thing}?",
        "In metres, our ropes are {rows}. Divide the rope of {thing} into parts {n} centimetres long: number of parts?",
        "Look up {thing} in {rows} (metres) and tell how many pieces of {n} centimetres come from it.",
        "The list shows wire in metres, {rows}. We saw the wire for {thing} every {n} centimetres. Pieces?",
        "With cloth of so many metres, {rows}, what number of {n} centimetres lengths does {thing} yield?",
    ),
    "cups": (
        "How many bottles of {n2} millilitres can I fill with {n1} litres?",
        "{n1} litres of milk go into jars of {n2} millilitres. Number of jars?",
        "Divide {n1} litres of water into portions of {n2} millilitres. How many portions are there?",
        "A pot with {n1} litres of tea serves how many mugs of {n2} millilitres?",
        "You have {n1} litres of paint and tins for {n2} millilitres. How many tins will be full?",
        "One dose is {n2} millilitres. How many doses do {n1} litres give?",
    ),
    "day name": (
        "What weekday is {date}? Reverse its letters, in capitals.",
        "Take {date}, find its weekday, and spell the weekday in reverse with capital letters.",
        "{date}: which day of the week? Write its letters from last to first in upper case.",
        "Look up the weekday of {date} in a calendar and flip its name. Upper case.",
        "I was born on {date}. Write my weekday of birth backwards, capitals only.",
        "The party is on {date}. Say the weekday with its letters reversed and capital.",
    ),
    "podium": (
        "Add the three biggest values in {nums}.",
        "Of the marks {nums}, take the top three and give their sum.",
        "Sum up the three highest of {nums}.",
        "Choose the three greatest entries of {nums}. How much are they in total?",
        "{nums}: sort these, keep three from the top, add them.",
        "A judge counts only the three largest points: {nums}. What does the player score?",
    ),
    "mirror sort": (
        "Reverse each word of {words} and then sort the reversed words, commas between.",
        "Spell {words} in reverse, one after another, and put the outcome in alphabetical order.",
        "First flip the letters in {words}. Next order the flipped words from a to z. Use commas.",
        "Sort alphabetically after writing each of {words} backwards.",
        "Take {words}. Each gets its letters reversed; list what you have then alphabetically.",
        "How does the sorted list look if all of {words} are first spelled from back to front?",
    ),
    "rent": (
        "{who} pays {n} coins a night from {date1} to {date2}. How much is that?",
        "A tent is {n} coins per day. {who} has it from {date1} until {date2}. Total coins?",
        "From {date1} to {date2}, {who} hires a van at {n} coins for every day. What must {who} pay?",
        "Multiply the days from {date1} to {date2} by {n} coins: what does {who} owe the hotel?",
        "{who} earns {n} coins each day between {date1} and {date2}. What are the earnings?",
        "Work out the price for {who} of a desk kept from {date1} until {date2} when one day is {n} coins.",
    ),
    "launch": (
        "Bottling dates: {rows}. {thing} may be sold {n} days after bottling. When is that? YYYY-MM-DD.",
        "{rows} were the sowing days. Which date is {n} days after the one for {thing} (YYYY-MM-DD)?",
        "See these dates: {rows}. Look up {thing} and go {n} days forward. Form YYYY-MM-DD.",
        "Each good came in on a day: {rows}. For {thing}, add {n} days and give YYYY-MM-DD.",
        "According to the list {rows}, {thing} was made when? Give the date {n} days later as YYYY-MM-DD.",
        "Shelf life of {thing} is {n} days. It starts on the date in {rows}. Last date, as YYYY-MM-DD?",
    ),
    "last word": (
        "Which of {words} is last in alphabetical order? Reverse it, in capitals.",
        "Order {words} from a to z, choose the final one, and flip its letters to upper case reversed.",
        "Find the alphabetically last of {words} and spell it in reverse, upper case.",
        "Take {words}, sort them, keep only the last, and write that one from end to start in capitals.",
        "The last of {words} in the alphabet, reversed and in capital letters, is what?",
        "Alphabetise {words}; then print the bottom word reversed, capitals only.",
    ),
    "voyage": (
        "{who} starts on {date} and needs {n} hours. On what date does {who} finish? YYYY-MM-DD.",
        "A machine of {who} runs {n} hours from {date} on. Which date does it stop (YYYY-MM-DD)?",
        "Add {n} hours to {date}. {who} wants the new date as YYYY-MM-DD.",
        "The ship with {who} on board sails off on {date} for {n} hours. Date of arrival, YYYY-MM-DD?",
        "{n} hours after {date}, which date is it? {who} writes YYYY-MM-DD.",
        "{who} began to fast on {date} for {n} hours. Tell the date of the end, YYYY-MM-DD.",
    ),
    "race": (
        "Five people, {names}, finished at different times. {facts}. Rank them all.",
        "Find the order of {names} given that {facts}.",
        "We have results of a chess cup for {names}: {facts}. Write the table from best to worst.",
        "{facts}. With this, sort {names} from champion to last.",
        "In the final were {names}. {facts}. Tell me the places one to five.",
        "From the clues {facts} deduce in which order {names} crossed the line.",
    ),
    "riddle": (
        "What is the smallest number over {n1} divisible by {n2} with remainder {n3} modulo {n4}?",
        "Search above {n1} for a multiple of {n2} that has remainder {n3} when {n4} divides it. Smallest one?",
        "A number beyond {n1} can be divided by {n2}. Divided by {n4} it leaves {n3}. Find the minimum.",
        "Look for x greater than {n1}, x a multiple of {n2}, x divided by {n4} leaving {n3}. Least x?",
        "Our house number is more than {n1}, {n2} goes into it evenly, and {n4} leaves a rest of {n3}. The smallest?",
        "Puzzle: least integer bigger than {n1}, no remainder by {n2}, remainder {n3} by {n4}.",
    ),
    "bill": (
        "Format as SURNAME, I. | YYYY-MM-DD | 0.00 the following: {who1} {who2}, {date}, {n} cents.",
        "{who1} {who2} was charged {n} cents on {date}. Put it in the shape SURNAME, I. | YYYY-MM-DD | 0.00.",
        "Turn this entry into SURNAME, I. | YYYY-MM-DD | 0.00: {n} cents, {date}, {who1} {who2}.",
        "I need a receipt row, SURNAME, I. | YYYY-MM-DD | 0.00. {who1} {who2} gave {n} cents on {date}.",
        "Record {date}, {n} cents, {who1} {who2}, with the template SURNAME, I. | YYYY-MM-DD | 0.00.",
    ),
    "stock": (
        "Format as NAME | 0000 | 0.00: {thing}, {n1} pieces, {n2} cents.",
        "We hold {n1} of {thing} at {n2} cents. Put it in the shape NAME | 0000 | 0.00.",
        "Turn this entry into NAME | 0000 | 0.00: {n2} cents for each of {n1} {thing}.",
        "I need a shelf tag, NAME | 0000 | 0.00, for {thing}: amount {n1}, unit price {n2} cents.",
        "Record {n1} times {thing}, {n2} cents apiece, with the template NAME | 0000 | 0.00.",
    ),
}
DOUBLE = (
    "First: {a} Second: {b} Answer with A; B.",
    "Two questions. 1) {a} 2) {b} Write both answers like A; B.",
    "Here is a pair of questions. First: {a} Second: {b} Put the answers in one line, A; B.",
    "Question one: {a} Question two: {b} Reply with A; B.",
    "Help me with both of these. First: {a} Second: {b} I expect A; B.",
    "a) {a} b) {b} Give me A; B with the answers to each.",
)


def reworded(rng: Random, text: str) -> str:
    """An arena question asked in some other way that means the same; a text of no known kind stays as it is."""
    problem = understand(text)
    if problem is None:
        return text
    if problem.parts:
        first, second = (_written(rng, part) for part in problem.parts[:2])
        return rng.choice(DOUBLE).format(a=first, b=second)
    return _written(rng, problem)


def _written(rng: Random, problem: Problem) -> str:
    values: Values = problem.slots
    family = problem.family
    if family is None:
        return ""
    own = [phrasing.pattern for phrasing in family.train]
    return rng.choice([*own, *MORE[family.name]]).format_map(values)
