"""Common English words. With a space in front, nearly all are one token in any BPE vocabulary."""

_TEXT = """
able about above across action after again age air all almost along already also always among
animal answer any appear area arm army around art ask away back ball bank base beautiful because
become bed before began begin behind being believe best better between big bird black blood blue
board boat body book born both bottom bring brother brought build building business buy call came
car care carry case catch cause center century certain change character check child children choose
church circle city class clear close cold color come common community company complete condition
consider contain control cook corner cost could country course cover create cross current cut dark
daughter day dead deal death decide deep design develop difference direction discover distance
doctor door down draw dream drive drop during each early earth east easy eat edge effect eight
either end energy enough enter even evening ever every example experience explain eye face fact
fall family far farm fast father feel feet few field fight figure final find fine finger fire first
fish five floor flow flower follow food foot force forest forget form forward four free friend from
front full game garden gas gave general girl give glass gold good government great green ground
group grow guess hair half hand happen happy hard head hear heart heat heavy help here high hill
history hold home hope horse hospital hot hour house human hundred idea important inch increase
industry inside interest iron island issue job join jump just keep key kind king know lake land
language large last late laugh law lay lead learn leave left leg length less letter level life lift
light like line list listen little live local long look lost lot love low machine main major make
man many map mark market mass matter maybe mean measure meet member metal method middle might mile
milk mind minute miss model modern moment money month moon more morning most mother mountain mouth
move much music must name nation nature near need never new next night nine north nose note nothing
notice noun number object ocean off offer office often oil old once only open order other our out
over own page paint paper part party pass past pattern pay peace people perhaps period person
picture piece place plain plan plane plant play point police poor port position possible pound power
practice present president press pretty price problem process produce product program provide public
pull push put question quick quiet race radio rain raise range rate reach read ready real reason
receive record red region remember rest result return rich ride right ring rise river road rock role
room rose round rule run safe sail salt same sand save school science sea season seat second section
see seem sell send sense sentence serve set seven shape share ship short should show side sight sign
simple since sing single sister size skin sky sleep slow small snow social soft soil soldier some
son song soon sound south space special speed spring square stand star start state stay step still
stone stood stop store story street strong student study subject success sudden sugar summer sun
support sure surface system table tail take talk teach team tell ten term test than thank their then
there thick thing think third those thought thousand three through time today together told took top
total touch toward town track trade train travel tree trip trouble true try turn type under unit
until use usual valley value very view village visit voice wait walk wall want war warm watch water
wave way weather week weight west wheel when where which while white whole why wide wife will wind
window winter wish woman wonder wood word work world would write wrong year yellow yes yet young
"""

WORDS = tuple(_TEXT.split())
