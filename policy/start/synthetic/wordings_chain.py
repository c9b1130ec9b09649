"""More wordings of the arena's questions in two or three steps, one a line."""

from __future__ import annotations

from collections.abc import Mapping

from policy.start.synthetic.wordings_single import lines

CHAINS: Mapping[str, tuple[str, ...]] = {
    "change": lines("""
        {rows} are prices. {who} takes {n1} bags of {thing} and gives {n2} coins. What does {who} get back?
        Look at the price list {rows}. After {n1} bags of {thing}, how much is left of the {n2} coins of {who}?
        {who} has {n2} coins and wants {n1} bags of {thing}. Prices: {rows}. How many coins remain in the purse?
        A bag costs what this list says: {rows}. Subtract {n1} bags of {thing} from {n2} coins for {who}.
        Prices per bag are {rows}. Work out what {who} keeps of {n2} coins after buying {n1} bags of {thing}.
        The market asks these coins a bag: {rows}. {who} puts {n2} coins down for {n1} bags of {thing}. And back?
        Tariff: {rows}. {who} spends part of {n2} coins on {n1} bags of {thing}. Compute the remaining money.
        {n1} bags {thing}, paid from {n2} coins, cost per bag as in {rows}. What is returned to {who}?
        Our stall sells at {rows}. If {who} pays {n2} for {n1} times {thing}, the cashier owes {who} how much?
        Cost table {rows}. Budget of {who}: {n2} coins. Purchase: {n1} bags of {thing}. Balance?
        Given a note worth {n2} coins, what must the seller return to {who}, who purchased {n1} bags of {thing}? {rows}
        {who} went shopping with {n2} coins: {n1} bags of {thing} at the rates {rows}. Money left over?
        One bag of each costs {rows}. {n2} coins minus {n1} bags of {thing}: tell {who} the difference.
        Figure out the refund for {who}: handed in {n2} coins, took {n1} bags of {thing}, prices {rows}.
        Rates are {rows}. {who} would like {n1} bags of {thing} and owns {n2} coins. How rich is {who} afterwards?
        Find the rest of {n2} coins once {thing} has been bought {n1} times by {who}, according to {rows}.
        A grocer charges {rows}. {who} slides {n2} coins over the counter, wanting {n1} bags of {thing}. What returns?
        Multiply the price of {thing} in {rows} by {n1} and deduct it from {n2}. {who} needs to know.
    """),
    "freight": lines("""
        Kilograms by good: {rows}. How many grams of {thing} is that?
        {rows}, all in kilograms. Convert the entry for {thing} to grams.
        We weighed the goods in kilograms, {rows}. I need {thing} in grams.
        Find {thing} in this list of kilograms, {rows}, and turn its figure into grams.
        Table of mass (kilograms): {rows}. Express the mass of {thing} as grams.
        The truck carries, in kilograms, {rows}. How heavy is {thing} if grams are the unit?
        Cargo (kilograms) {rows}. Grams of {thing}?
        Look up {thing}, whose kilograms are among {rows}, and change kilograms to grams.
        Our scale printed kilograms: {rows}. The customer asks for {thing}, measured in grams.
        Each load in kilograms: {rows}. What would the load of {thing} be, expressed in grams?
        Shipment sheet, unit kilograms: {rows}. Please translate the line of {thing} to grams.
        {thing} is somewhere in {rows} (kilograms). How many grams does it make?
        Take the kilograms of {thing} out of {rows}; report grams.
        A porter lifts {rows}, given in kilograms. How many grams does he lift with {thing} alone?
        Parcels and their kilograms: {rows}. We fill in grams on the slip for {thing}. Which figure?
        Read the kilograms next to {thing} and restate them in grams: {rows}.
        Stores, kilograms each: {rows}. Amount of {thing} in grams, please.
        Kitchen supplies by kilograms, {rows}; the recipe says grams. Convert {thing}.
    """),
    "pieces": lines("""
        Ribbon lengths in metres: {rows}. Cut the {thing} ribbon into bits of {n} centimetres. How many bits?
        {rows} are lengths in metres. How often do {n} centimetres fit into the length for {thing}?
        In metres, our ropes are {rows}. Divide the rope of {thing} into parts {n} centimetres long: number of parts?
        Look up {thing} in {rows} (metres) and tell how many pieces of {n} centimetres come from it.
        The list shows wire in metres, {rows}. We saw the wire for {thing} every {n} centimetres. Pieces?
        With cloth of so many metres, {rows}, what number of {n} centimetres lengths does {thing} yield?
        Metres of string per parcel: {rows}. Snip what belongs to {thing} at {n} centimetres each. Count the snippets.
        Chains (metres) {rows}. How many links of {n} centimetres make up the one for {thing}?
        We own planks, metres: {rows}. Sawing {thing} to {n} centimetres gives how many boards?
        From the metres of {thing} in {rows}, sections measuring {n} centimetres are made. Total sections?
        Fabric rolls in metres: {rows}. Strips of {n} centimetres are needed; how many does roll {thing} give?
        Stock of pipe, metres, by label: {rows}. Chop {thing} up, {n} centimetres a chunk. Number of chunks?
        A hose for {thing} has the metres found in {rows}. Slice it at {n} centimetres. How many slices result?
        {rows}: metres of paper. Sheets of {n} centimetres from the {thing} paper, how many?
        Split {thing}, metres listed in {rows}, by {n} centimetres.
        How many {n} centimetres segments are inside {thing}? Metres follow: {rows}.
        Tell me the count of {n} centimetres stripes obtainable when the band of {thing} is taken from {rows} (metres).
        Thread in metres, {rows}. A tailor wants {n} centimetres each time and uses up {thing}. How many times?
    """),
    "cups": lines("""
        How many bottles of {n2} millilitres can I fill with {n1} litres?
        {n1} litres of milk go into jars of {n2} millilitres. Number of jars?
        Divide {n1} litres of water into portions of {n2} millilitres. How many portions are there?
        A pot with {n1} litres of tea serves how many mugs of {n2} millilitres?
        You have {n1} litres of paint and tins for {n2} millilitres. How many tins will be full?
        One dose is {n2} millilitres. How many doses do {n1} litres give?
        {n1} litres, {n2} millilitres per glass: glasses?
        A barrel contains {n1} litres. Each guest drinks {n2} millilitres. For how many guests does it suffice?
        The nurse hands out {n2} millilitres at a time from {n1} litres of syrup. How often can she do so?
        We bottle {n1} litres of oil in flasks that take {n2} millilitres. Flasks required?
        Out of a keg with {n1} litres, pour servings of {n2} millilitres. Count the servings.
        Our machine fills {n2} millilitres into every carton. It used {n1} litres. Cartons produced?
        How many times does {n2} millilitres go into {n1} litres?
        Lemonade: {n1} litres prepared, beakers of {n2} millilitres. Compute how many beakers.
        The kettle carries {n1} litres; a teacup, {n2} millilitres. How many teacups before it is empty?
        A plant needs {n2} millilitres. How many plants will {n1} litres water?
        Perfume of {n1} litres shall be sold in vials with {n2} millilitres inside. Number of vials sold?
        Share {n1} litres out by ladles of {n2} millilitres. Ladles in total?
        Tell me how many {n2} millilitres shots a bucket of {n1} litres has.
    """),
    "day name": lines("""
        What weekday is {date}? Reverse its letters, in capitals.
        Take {date}, find its weekday, and spell the weekday in reverse with capital letters.
        {date}: which day of the week? Write its letters from last to first in upper case.
        Look up the weekday of {date} in a calendar and flip its name. Upper case.
        I was born on {date}. Write my weekday of birth backwards, capitals only.
        The party is on {date}. Say the weekday with its letters reversed and capital.
        Weekday of {date}, reversed, uppercase.
        Is {date} a Monday, a Tuesday, or what? Spell it back to front, block capitals.
        Determine which weekday {date} was. Mirror the word and uppercase it.
        My diary misses the weekday for {date}. Fill it in, but in reverse and all caps.
        Which name does the day {date} have within its week? Reverse that name, uppercase.
        Tell me the weekday on {date}, with its characters in opposite order, in capital letters.
        We meet on {date}. Which weekday will it be, if you flip the spelling and capitalise everything?
        Compute weekday({date}).reverse().upper().
        Given {date}, output the weekday in backward capitals.
        Name the weekday ({date}); then turn the name round, tail first, upper case.
        Someone writes weekdays mirrored, in capitals. What would they write for {date}?
    """),
    "podium": lines("""
        Add the three biggest values in {nums}.
        Of the marks {nums}, take the top three and give their sum.
        Sum up the three highest of {nums}.
        Choose the three greatest entries of {nums}. How much are they in total?
        {nums}: sort these, keep three from the top, add them.
        A judge counts only the three largest points: {nums}. What does the player score?
        Total of the top three: {nums}?
        From {nums}, ignore all but the three maximum numbers; their total is what?
        Which amount results if the three biggest of {nums} are summed?
        Drop the low ones of {nums} until three remain, then sum.
        The three strongest throws are added. Throws: {nums}. Compute the result.
        Find the largest, second largest and third largest in {nums} and put them together by addition.
        Medals go to the highest three in {nums}. Combined points of the medal winners?
        Our three best days sold how much jointly, if sales were {nums}?
        Calculate the sum over the three leading numbers among {nums}.
        sum(top 3 of {nums}) = ?
        Rank {nums}, cut after place three, and total what you kept.
        The final grade is a sum of the three superior results out of {nums}. The grade?
        Collect three numbers from {nums} so the total is as large as can be. That total?
    """),
    "mirror sort": lines("""
        Reverse each word of {words} and then sort the reversed words, commas between.
        Spell {words} in reverse, one after another, and put the outcome in alphabetical order.
        First flip the letters in {words}. Next order the flipped words from a to z. Use commas.
        Sort alphabetically after writing each of {words} backwards.
        Take {words}. Each gets its letters reversed; list what you have then alphabetically.
        How does the sorted list look if all of {words} are first spelled from back to front?
        Mirror every word, then alphabetise: {words}.
        Each item of {words} is read from right to left. Arrange these readings like a dictionary does.
        Flip every one of {words}; afterwards bring the flipped ones in lexical order, comma separated.
        Invert the spelling of {words} one by one. Order the inverted spellings, a first.
        Transform all of {words} by reversal and give the alphabetical list of the results.
        Every word in {words} turns round. What does the alphabetic list of turned words look like?
        sorted(reverse(w) for w in {words}), comma separated.
        Back to front goes each of {words}. Now rank the strange new words by alphabet.
        Produce reversals for {words}, and sort those reversals.
        Imagine {words} seen in a mirror. List the mirrored words in alphabetical sequence.
        Write the opposite spelling of all items ({words}) and index them alphabetically.
        Undo letter order inside each of {words}; the products should be listed from a to z.
        Two steps: reverse the letters of each, then sort. The words are {words}.
    """),
    "rent": lines("""
        {who} pays {n} coins a night from {date1} to {date2}. How much is that?
        A tent is {n} coins per day. {who} has it from {date1} until {date2}. Total coins?
        From {date1} to {date2}, {who} hires a van at {n} coins for every day. What must {who} pay?
        Multiply the days from {date1} to {date2} by {n} coins: what does {who} owe the hotel?
        {who} earns {n} coins each day between {date1} and {date2}. What are the earnings?
        Work out the price for {who} of a desk kept from {date1} until {date2} when one day is {n} coins.
        Daily fee {n} coins, {date1} till {date2}. Bill for {who}?
        {who} parks a car on {date1} and fetches it {date2}. Parking is {n} coins daily. Cost?
        How much does {who} spend lodging between {date1} and {date2} at a rate of {n} coins per night?
        A skipper charges {who} {n} coins daily, {date1} through {date2}. The whole charge?
        The garage takes {n} coins for one day. {who} used it since {date1} and left on {date2}. Amount due?
        Renting began {date1}, returned {date2}, {n} coins daily: compute the fee of {who}.
        Calculate {who}'s wage, {n} coins a day, employed {date1} until {date2}.
        If storage costs {n} coins daily, what will {who} be billed for {date1} to {date2}?
        {who} feeds a horse for {n} coins every day. Start {date1}, end {date2}. Total expense?
        Between {date1} and {date2} a guide works for {who}, asking {n} coins per day. Sum to be paid?
        {who} leases a bike ({n} coins daily) on {date1}, giving it back {date2}. Total price?
        Count days, {date1} to {date2}, times {n}. {who} will pay that; how much is it?
    """),
    "launch": lines("""
        Bottling dates: {rows}. {thing} may be sold {n} days after bottling. When is that? YYYY-MM-DD.
        {rows} were the sowing days. Which date is {n} days after the one for {thing} (YYYY-MM-DD)?
        See these dates: {rows}. Look up {thing} and go {n} days forward. Form YYYY-MM-DD.
        Each good came in on a day: {rows}. For {thing}, add {n} days and give YYYY-MM-DD.
        According to the list {rows}, {thing} was made when? Give the date {n} days later as YYYY-MM-DD.
        Shelf life of {thing} is {n} days. It starts on the date in {rows}. Last date, as YYYY-MM-DD?
        Harvest calendar {rows}. {thing} ripens for {n} further days. Ready on (YYYY-MM-DD)?
        Production log: {rows}. {thing} expires once {n} days are over. Expiry, YYYY-MM-DD?
        Find the date of {thing} in {rows} and count {n} days on from there. YYYY-MM-DD please.
        Arrivals: {rows}. Inspect {thing} {n} days after arrival. Inspection date YYYY-MM-DD?
        Deliveries were on {rows}. We pay {n} days after. When do we pay {thing}? YYYY-MM-DD
        Take the entry {thing} from {rows}, shift by {n} days, output YYYY-MM-DD.
        Everything was stored on its own date, {rows}. {thing} stays fresh {n} days. Until when? YYYY-MM-DD
        {thing} must rest {n} days, beginning at its date in {rows}. Done when (YYYY-MM-DD)?
        Registers say {rows}. What is {thing}'s date plus {n} days, as YYYY-MM-DD?
        Test schedule {rows}; the result of {thing} follows {n} days behind. Result date in YYYY-MM-DD?
        {n} days pass after {thing} was filled (dates: {rows}). Which date then, YYYY-MM-DD?
        Plan the sale of {thing}: its date in {rows}, then {n} days of waiting. YYYY-MM-DD.
    """),
    "last word": lines("""
        Which of {words} is last in alphabetical order? Reverse it, in capitals.
        Order {words} from a to z, choose the final one, and flip its letters to upper case reversed.
        Find the alphabetically last of {words} and spell it in reverse, upper case.
        Take {words}, sort them, keep only the last, and write that one from end to start in capitals.
        The last of {words} in the alphabet, reversed and in capital letters, is what?
        Alphabetise {words}; then print the bottom word reversed, capitals only.
        Of {words}, the one closest to z: mirror it, uppercase.
        Sort the list {words}. Only its end matters: reverse that single word, all caps.
        Pick from {words} whatever a dictionary would put behind the others; reversed, big letters.
        Rank {words} alphabetically. Back-spell the lowest ranked one with capitals.
        reverse(max({words})).upper() = ?
        Who stands at the end when {words} line up by alphabet? Write this one mirrored and uppercase.
        Arrange {words} in dictionary sequence, discard all except the final one, flip it, capitalise it.
        Select the word nearest the end of the alphabet out of {words}. Turn it round; uppercase.
        {words}: after sorting, what is at the bottom? Give it tail first in caps.
        The loser of an alphabetical contest among {words} is printed in reverse capitals. Print it.
        Choose one of {words}, that with the greatest first letter, and invert its spelling, upper case.
    """),
    "voyage": lines("""
        {who} starts on {date} and needs {n} hours. On what date does {who} finish? YYYY-MM-DD.
        A machine of {who} runs {n} hours from {date} on. Which date does it stop (YYYY-MM-DD)?
        Add {n} hours to {date}. {who} wants the new date as YYYY-MM-DD.
        The ship with {who} on board sails off on {date} for {n} hours. Date of arrival, YYYY-MM-DD?
        {n} hours after {date}, which date is it? {who} writes YYYY-MM-DD.
        {who} began to fast on {date} for {n} hours. Tell the date of the end, YYYY-MM-DD.
        {date} plus {n} hours, as YYYY-MM-DD?
        {who} switches a lamp on at {date}; it burns {n} hours. When does it go dark? YYYY-MM-DD
        Computation begins {date}, lasting {n} hours. Report the finishing date to {who}: YYYY-MM-DD.
        Change {n} hours to days, go that far past {date}, and tell {who} the date, YYYY-MM-DD.
        A battery charged by {who} on {date} lives {n} hours. It dies on (YYYY-MM-DD)?
        {who} flies out {date} and is on the way {n} hours. Landing date? YYYY-MM-DD.
        Paint put on by {who} at {date} dries in {n} hours. Dry on which date? YYYY-MM-DD.
        The siege opened {date} and held for {n} hours. Final date as YYYY-MM-DD?
        An alarm of {who} is set {n} hours ahead of {date}'s start. On what date will it ring (YYYY-MM-DD)?
        Let {n} hours elapse from {date}. Calendar date now, YYYY-MM-DD?
        {who} has {n} hours of work without a break, first hour on {date}. Ends at which date? YYYY-MM-DD
        Expedition: departure {date}, length {n} hours, leader {who}. Return date YYYY-MM-DD?
        How does the calendar read, YYYY-MM-DD, when {n} hours have gone since {date}? Asked by {who}.
    """),
}
