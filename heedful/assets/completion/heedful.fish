# Completion of heedful @VERSION@ in fish. Written by: heedful completion fish

function __heedful_table
    switch "$argv[1]"
@TABLES@
    end
end

function __heedful_complete
    set -l words (commandline -opc)
    set -l cur (commandline -ct)
    set -l verb $words[2]
    set -l rows (__heedful_table "$verb")
    if test -z "$rows"
        __fish_complete_path $cur
        return
    end
    set -l option ''
    set -l at 0
    for word in $words[3..-1]
        if test -n "$option"
            set option ''
        else if string match -q -- '--*=*' $word
            continue
        else if string match -q -- '-*' $word
            if not string match -q -- "$word|-*" $rows; and not string match -q -- "\?$word|-*" $rows
                set option $word
            end
        else
            set at (math $at + 1)
        end
    end
    set -l wanted ''
    set -l before ''
    set -l words_too (string match -- '=*' $rows)
    if test -z "$option"; and begin
            string match -q -- '--*=*' $cur; or begin
                set -q words_too[1]; and string match -q -- '*=*' $cur
            end
        end
        set option (string split -m 1 = -- $cur)[1]
        set before "$option="
    end
    if test -n "$option"
        set wanted $option
    else if test -n "$verb"; and not string match -q -- '-*' $cur
        set wanted (math $at + 1)
    end
    if test -n "$wanted"
        for row in $rows
            set -l columns (string split -m 2 '|' -- $row)
            set -l name (string replace -r '^\?' '' -- $columns[1])
            if contains -- "$name" "$wanted" "--$wanted" "=$wanted"; and not string match -q -- '\**' $columns[2]
                for value in (string split -n ' ' -- (string replace -r '^-' '' -- $columns[2]))
                    echo $before$value
                end
                return
            end
        end
        if test -n "$cur" -a -z "$before"; and set -q words_too[1]; and string match -qr -- '^[0-9]+$' $wanted
            # settings as PATH=VALUE
            set -l settings (string replace -rf -- '^(?:[?=]|(?=--[^|]*\.))(?:--)?([^|]*)\|[^|]*\|(.*)' '$1|$2' $rows)
            set -l start (string escape --style=regex -- $cur)
            string replace -rf -- "^($start""[^.|]*)\|(.*)" '$1=\t$2' $settings
            string replace -rf -- "^($start""[^.|]*\.).*" '$1' $settings | sort -u
        end
        __fish_complete_path (string replace -- "$before" '' $cur)
        return
    end
    set -l start (string escape --style=regex -- $cur)
    set -l found (string match -r -- "^$start.*" $rows)
    if string match -q -- '--?*' $cur # the end of a setting's path
        set -a found (string replace -rf -- "^\?($start.*)" '$1' $rows)
    end
    if test -n "$verb"
        set found (string match -- '-*' $found)
    end
    set -l leaves (string replace -rf -- "^($start""[^.|]*)\|[^|]*\|(.*)" '$1\t$2' $found)
    set -l tables (string replace -rf -- "^($start""[^.|]*\.).*" '$1' $found)
    printf '%s\n' $leaves
    set -q tables[1]; and printf '%s\n' $tables | sort -u
end

complete -c heedful -f -k -a '(__heedful_complete)'
